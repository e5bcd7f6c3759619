"""Tiers of the prefix cache below the device: main memory, then a disk. No torch, no files."""
