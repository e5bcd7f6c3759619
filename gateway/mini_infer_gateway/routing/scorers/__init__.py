"""Scorers that express preferences: one scorer a file, each gives every candidate a number from 0 to 1."""
