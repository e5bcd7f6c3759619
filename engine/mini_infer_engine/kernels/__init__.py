"""Triton kernels for the forward pass on an NVIDIA GPU. Imported only where there is one; every kernel has a torch twin."""
