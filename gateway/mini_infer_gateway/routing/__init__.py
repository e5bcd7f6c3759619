"""Chooses the endpoint of a request with filters, producers, scorers and a picker; pure: time and randomness
come in.
"""
