"""Measurements, as commands: `python -m bench`. Not shipped."""
