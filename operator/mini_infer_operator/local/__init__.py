"""Runs a plan as processes on this machine: `mini-infer up`."""
