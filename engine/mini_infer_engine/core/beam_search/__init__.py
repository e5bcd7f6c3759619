"""Beam search: several continuations of one prompt that share pages, chosen together after each pass."""
