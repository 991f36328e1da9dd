"""What is computed, on disk or in an object store: written once, sealed, named by what it was made from."""
