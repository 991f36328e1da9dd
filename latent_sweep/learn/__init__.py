"""Learning a chain of tasks and scoring it after each: the loop over tasks and the loop over steps."""
