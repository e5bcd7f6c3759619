"""Building blocks of the models, shared by all architectures."""
