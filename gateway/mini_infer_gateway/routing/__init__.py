"""Where a request goes: filters, then producers, then scorers, then a picker; pure, with time and randomness passed in."""
