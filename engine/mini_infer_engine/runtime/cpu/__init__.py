"""The executor in plain torch, for CPUs and as the reference in tests."""
