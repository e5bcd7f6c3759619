"""The way of one request: read, resolve the model, tokenise, route, attempt, and attempt again elsewhere."""
