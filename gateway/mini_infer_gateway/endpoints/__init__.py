"""Finds endpoints, from a file or from a watch of pods; each source has its module."""
