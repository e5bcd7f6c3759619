"""Renders a plan as objects of the API server, and reads, writes and compares those objects."""
