"""Keeps the table in shape and tells what a deployment gets wrong."""
