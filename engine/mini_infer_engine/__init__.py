"""The engine: paged KV cache, continuous batching, prefix cache; the only package that imports torch."""
