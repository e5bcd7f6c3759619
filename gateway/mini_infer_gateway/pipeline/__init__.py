"""The request pipeline: reads, resolves the model, tokenises, routes, attempts, and retries elsewhere."""
