"""The gateway: sends each OpenAI request to the pod that already holds most of its prompt's KV cache."""
