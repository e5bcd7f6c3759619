"""Triton kernels for the forward pass on an NVIDIA GPU. Imported only where there is one; each has a torch twin."""
