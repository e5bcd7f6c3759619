"""Faults of engines for `benchmarks/canary.py`."""
