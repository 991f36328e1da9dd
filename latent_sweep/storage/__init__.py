"""Checksummed files and journals, in a folder or an object store, named by the hash of what produced them."""
