"""The command line `latent-sweep`: one module for each group of commands."""
