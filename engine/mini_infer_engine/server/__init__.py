"""The OpenAI server: an HTTP process with the text, a core process with the tokens, ZMQ between them. No torch."""
