"""Faults of engines, and wrong models, for `benchmarks/canary.py`."""
