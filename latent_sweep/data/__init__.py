"""Benchmarks: their definitions, prompts and examples."""
