"""Defines what engine, gateway and operator agree on: block keys, KV events, prompts, the resource, names of launches
and metrics.
"""
