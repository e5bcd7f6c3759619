"""Images of prompts: files from clients or the network, and their values by processes within limits. No torch."""
