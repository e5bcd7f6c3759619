"""Limits of a client's connections, as servers declare them. Pure data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one server; connections of all states count, from the accepted socket to the last byte sent."""

    max_connections: int = 8192
    """Most connections at once; each takes some 20 KiB."""
    max_connections_per_peer: int = 4096
    """Most connections of one peer address (an IPv6 peer is its /64): half of all, as a proxy in front of the server is
    one peer.
    """
    max_header_bytes: int = 64 << 10
    """Most bytes of one request's headers; servers allow 8 to 64 KiB."""
    idle_timeout_s: float = 30.0
    """Seconds that a new connection may stay open before its first request begins."""
    head_timeout_s: float = 20.0
    """Seconds from a request's first byte to the end of its headers; also for the handshakes of TLS and WebSocket."""
    body_timeout_s: float = 30.0
    """Seconds for a body to arrive, and a second more for every `min_body_rate` bytes of it."""
    min_body_rate: int = 16 << 10
    """Slowest accepted rate of a body, in bytes a second."""
    write_timeout_s: float = 60.0
    """Seconds within which a client must read something of the data that waits for it."""
    websocket_idle_timeout_s: float = 3600.0
    """Seconds that a WebSocket stays open without a message in either direction; OpenAI ends one after an hour."""


MAX_PIPELINED_REQUESTS = 64
"""Requests of one connection that may wait for the answer to the one before (RFC 9112, 9.3.2)."""
MAX_PIPELINED_BYTES = 1 << 20
"""Most bytes received behind a request that is being answered."""
LINGER_S = 5.0
"""Seconds for the client of a closed connection to take what was sent to it; then the connection is reset."""
WEBSOCKET_SHARE = 4
"""One in this many of a peer's connections may be a WebSocket: idle ones cannot be distinguished from
those that wait.
"""
UNFINISHED_MESSAGES_BYTES = 64 << 20
"""Bytes of WebSocket messages that have arrived in part, over all connections of a server."""
MAX_SLOW_READERS = 512
"""Connections of a server whose clients do not take what is sent to them; some 0.3 MiB wait for each."""
MAX_FRAGMENTS = 4096
"""Most fragments of one WebSocket message: empty ones add nothing to its size."""
