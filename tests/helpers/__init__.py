"""Shared by the tests: tiny backbones and sweeps, halted processes, local servers."""
