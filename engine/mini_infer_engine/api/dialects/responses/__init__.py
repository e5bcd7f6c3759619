"""OpenAI's Responses endpoint: requests parsed, outputs rendered."""
