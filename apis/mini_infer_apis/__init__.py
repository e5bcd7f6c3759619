"""The OpenAI and Anthropic APIs apart from any engine: dialects, and responses that are stored."""
