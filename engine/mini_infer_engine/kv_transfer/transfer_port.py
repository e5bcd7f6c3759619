"""Where an engine's KV transfer listens, and as what: what its two processes tell each other of it."""

import msgspec


class TransferPort(msgspec.Struct, frozen=True, kw_only=True):
    """Of control; keys and values themselves go other ways."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: KV transfer is off."""
    role: str = "unified"
