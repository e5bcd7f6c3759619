"""How many tokens to guess in which rows: decisions alone, by acceptance and measured times. No torch."""
