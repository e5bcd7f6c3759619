"""OpenAI's chat, completions and embeddings endpoints: requests parsed, outputs rendered."""
