"""Runs one model on several devices: the parts of the ranks, the messages between them, and their life cycle."""
