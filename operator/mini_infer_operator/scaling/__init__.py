"""Decides how many engines of each role a service has, from what gateways report. Pure: it reads no clock and sends no
request. The operator, `mini-infer up` and benchmarks/autoscaling.py use the same planner.
"""
