"""Kernels of layers with a recurrent state: convolutions, updates by one token, and scans over chunks."""
