"""Model configs and one file for each architecture."""
