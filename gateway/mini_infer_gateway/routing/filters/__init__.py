"""Who may be chosen at all: one filter a file, each keeps a subset of the candidates."""
