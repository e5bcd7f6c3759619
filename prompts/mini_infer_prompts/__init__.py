"""Turns messages into token ids: chat templates in a sandbox, tokenizer files, and segments that are cached."""
