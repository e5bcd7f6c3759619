"""How a model's hidden states become one vector or one set of scores for a text: read from its folder. No torch."""
