"""What engine, gateway and operator agree on: block keys, KV events, prompts, the resource, launch and metric names."""
