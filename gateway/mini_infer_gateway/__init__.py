"""The gateway: sends each OpenAI request to the pod that already has most of its prompt's KV cache."""

__version__ = "0.1.0"
