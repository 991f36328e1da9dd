"""What came out, for people and trackers: tables, pictures, where a sweep stands, the content of runs."""
