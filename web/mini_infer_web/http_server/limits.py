"""What a client may do with a connection, and how servers declare it. Pure data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one server; connections of all states count, from the accepted socket to the last byte sent."""

    max_connections: int = 8192
    """Each takes some 20 KiB."""
    max_connections_per_peer: int = 4096
    """Of one peer address (an IPv6 peer is its /64): half of all, as a proxy in front of the server is one peer."""
    max_header_bytes: int = 64 << 10
    """Of one request; servers allow 8 to 64 KiB."""
    idle_timeout_s: float = 30.0
    """Without the beginning of a first request."""
    head_timeout_s: float = 20.0
    """From a request's first byte to the end of its headers; also for the handshakes of TLS and WebSocket."""
    body_timeout_s: float = 30.0
    """For a body to arrive, and a second more for every `min_body_rate` bytes of it."""
    min_body_rate: int = 16 << 10
    """Bytes a second."""
    write_timeout_s: float = 60.0
    """For a client to read anything of what waits for it."""
    websocket_idle_timeout_s: float = 3600.0
    """Without a message in either direction on a WebSocket; OpenAI ends one after an hour."""


MAX_PIPELINED_REQUESTS = 64
"""Requests of one connection that may wait for the answer to the one before (RFC 9112, 9.3.2)."""
MAX_PIPELINED_BYTES = 1 << 20
"""Received behind a request that is being answered."""
LINGER_S = 5.0
"""For a closed connection to take what was sent to it; then it is reset."""
WEBSOCKET_SHARE = 4
"""One in so many of a peer's connections may be a WebSocket: idle ones cannot be told from those that wait."""
MAX_FRAGMENTS = 4096
"""Of one WebSocket message: empty ones add nothing to its size."""
