"""Timeout of tests."""

PATIENCE = 1000.0
"""Seconds; much longer than needed on a slow, busy machine."""
