"""Chooses the endpoint of a request with filters, producers, scorers and a picker. Pure.

Time and randomness are passed in.
"""
