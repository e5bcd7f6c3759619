"""Describes how a model's hidden states become one vector or one set of scores for a text. No torch."""
