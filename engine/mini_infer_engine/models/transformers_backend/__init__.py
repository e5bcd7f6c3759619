"""Models whose code is transformers': its modules compute everything but attention, which reads our page pool."""
