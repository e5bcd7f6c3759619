"""Passes over layers with a recurrent state, and what such models do not support yet."""
