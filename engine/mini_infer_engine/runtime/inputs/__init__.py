"""Batches as tensors: staged on the host and copied to the device once a pass."""
