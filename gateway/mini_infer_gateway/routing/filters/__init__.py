"""Filters that decide which candidates may be chosen: one filter a file, each keeps a subset of the candidates."""
