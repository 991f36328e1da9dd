"""Benchmarks as data: what their tasks are, how prompts are written, and where rows come from."""
