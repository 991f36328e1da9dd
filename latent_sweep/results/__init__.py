"""What came out, for people and trackers: tables, pictures, lines of progress, the content of runs."""
