"""Decides how many tokens to draft in which rows, by acceptance and measured times. Decisions alone; no torch."""
