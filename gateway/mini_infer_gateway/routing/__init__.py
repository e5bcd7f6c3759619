"""Where a request goes: filters, producers, scorers, a picker; pure, with time and randomness passed in."""
