"""Sums and concatenations over the GPUs of one host, which access each other's memory."""
