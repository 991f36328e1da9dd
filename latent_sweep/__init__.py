"""latent_sweep: sweeps of continual-learning trials on frozen language models."""

__version__ = "0.1.0"
