"""Results of finished trials: score matrices, summary statistics, comparisons and data frames."""
