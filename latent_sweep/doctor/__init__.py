"""`latent-sweep doctor`: checks a machine or cluster before a sweep runs on it."""
