"""Eviction of cached tokens: which of them a policy keeps, and how the page pool is compacted."""
