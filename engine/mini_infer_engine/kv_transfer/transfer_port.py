"""Describes the port and role of an engine's KV transfer, for messages between the engine's two processes."""

import msgspec


class TransferPort(msgspec.Struct, frozen=True, kw_only=True):
    """The control port; keys and values themselves take other paths."""

    host: str = "127.0.0.1"
    port: int = 0
    """TCP port; 0 if KV transfer is off."""
    role: str = "unified"
