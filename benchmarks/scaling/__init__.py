"""The parts of benchmarks/autoscaling.py: loads, a fleet whose size changes, and autoscalers to compare with."""
