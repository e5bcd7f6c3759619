"""The offline API: `LLM`, its prompts, parameters and outputs, under vLLM's names."""
