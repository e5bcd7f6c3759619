"""A model folder's JSON files, read into frozen data."""
