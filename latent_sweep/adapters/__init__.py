"""Adapters: what is added to a frozen projection, and the bank that adds it."""
