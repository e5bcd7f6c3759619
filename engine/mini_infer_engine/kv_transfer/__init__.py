"""Keys and values between engines: prompts computed elsewhere, prefixes fetched from whoever has them."""
