"""The live state of a sweep: trials, workers, progress and time left, for a terminal or a log."""
