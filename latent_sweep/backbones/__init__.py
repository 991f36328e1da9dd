"""The frozen models: known by name, identified, loaded, batched for, and asked for answers."""
