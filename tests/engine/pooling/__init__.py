"""Embeddings and scores: what pooling models compute."""
