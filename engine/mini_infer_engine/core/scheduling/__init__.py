"""Policies of the scheduler: in which order sequences run, which are refused, and which one is preempted."""
