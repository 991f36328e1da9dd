"""Reports of a sweep: text tables, LaTeX, figures and the HTML page."""
