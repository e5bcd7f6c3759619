"""Sums and concatenations over the GPUs of one host, by reading each other's memory."""
