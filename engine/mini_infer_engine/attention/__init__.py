"""Attention over the page pool: one interface, several backends."""
