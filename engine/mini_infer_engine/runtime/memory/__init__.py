"""The page pool of keys and values, and how device memory is divided."""
