"""Training and evaluation of one pack of trials, task after task."""
