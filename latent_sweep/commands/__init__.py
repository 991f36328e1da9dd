"""The commands of the console script, a file for each chapter of its help; each imports what it needs when it runs."""
