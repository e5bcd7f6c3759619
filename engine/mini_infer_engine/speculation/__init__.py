"""Speculative decoding: guesses of the next tokens, several of which the model checks in one pass. Same text."""
