"""Defines what engine, gateway and operator agree on: block keys, KV events, options, the endpoints file, and names."""
