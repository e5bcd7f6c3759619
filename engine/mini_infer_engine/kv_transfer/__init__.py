"""Transfers keys and values between engines: of prompts that another engine computes, and of prefixes that it has
cached.
"""
