"""The task router: Gaussian mixtures over prompt embeddings, how task adapters are combined, and how well it routes."""
