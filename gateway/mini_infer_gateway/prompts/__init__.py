"""Converts a request's body to the block keys of its prompt: tokenizers, remembered prompts, and worker threads."""
