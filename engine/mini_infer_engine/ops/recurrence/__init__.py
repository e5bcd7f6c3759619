"""Recurrences over tokens in plain torch, for any device: scans of prompts in chunks, and updates by one token."""
