"""The task router: Gaussian mixtures over prompt embeddings, combinations of snapshots, and routing metrics."""
