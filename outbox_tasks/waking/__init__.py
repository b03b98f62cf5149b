"""Wakes the relay between beat's ticks: the bell in Redis, the writers' side of it, and PostgreSQL's notifications."""
