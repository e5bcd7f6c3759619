"""Which tokens may come next in outputs that are held to grammars."""
