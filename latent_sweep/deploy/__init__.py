"""A model out of a sweep: asked, taught further tasks, and exported for others to load."""
