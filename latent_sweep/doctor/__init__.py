"""`latent-sweep doctor`: what a user runs on a new machine or cluster before trusting it with a sweep."""
