"""Fills a service's fields from InferencePresets: choice and merge, as pure functions."""
