"""Which endpoint holds which blocks of which prompts, and the order of the events that say so. Pure."""
