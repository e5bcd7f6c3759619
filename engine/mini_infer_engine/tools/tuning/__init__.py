"""Implements `mini-infer tune`: measures tile configs for a model's products on this GPU, and stores the fastest."""
