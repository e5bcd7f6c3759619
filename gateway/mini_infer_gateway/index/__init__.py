"""The index of cached blocks: maps prompts to the endpoints that have their blocks, and orders KV events. Pure."""
