"""A request's body to the block keys of its prompt: tokenizers, what is remembered of prompts, and the threads."""
