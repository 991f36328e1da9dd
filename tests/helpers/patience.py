"""How long a test waits for what has to happen."""

PATIENCE = 1000.0
"""Seconds: much longer than the slowest and busiest machine takes, so that only what hangs reaches them."""
