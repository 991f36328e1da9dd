"""Scores of answers, and measures of learning and forgetting from the score matrix.

Scores are fractions in [0, 1]; tables show percent. All functions are pure.
"""
