"""Judges a new revision beside the old one, and decides how many requests it gets. Pure: times and figures come in."""
