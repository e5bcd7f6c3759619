"""Anthropic's Messages endpoint: requests parsed, outputs rendered."""
