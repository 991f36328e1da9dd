"""The frozen models: their registry, identity, loading, batching and generation."""
