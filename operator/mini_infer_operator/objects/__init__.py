"""A plan as objects of the API server: what they look like, how they are read, written and compared."""
