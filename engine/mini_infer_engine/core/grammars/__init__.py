"""Computes which tokens may come next in outputs that must match grammars."""
