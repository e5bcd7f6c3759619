"""Counts connections by peer address, and chooses which one to close where there are as many as may be.

Follows nginx, which reuses idle connections when it runs out of them (ngx_drain_connections): a new connection takes
the place of the one that has waited longest without a complete request, so that connections that only exist lock nobody
out. A request that is being answered is never ended for another connection.
"""

from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Protocol

from mini_infer_web.api_errors import ApiError
from mini_infer_web.http_server.limits import WEBSOCKET_SHARE, ConnectionLimits


class Connection(Protocol):
    """A connection that may have to make room for another."""

    def displace(self) -> None:
        """Closes the connection: another client needs its place."""


@lru_cache(maxsize=4096)
def peer_of(address: str) -> str:
    """Returns the name under which a client address is counted.

    An IPv6 client chooses among the 2**64 addresses of its network, so the network counts; IPv4 addresses that are
    mapped into IPv6 count as IPv4. What is no address, such as that of a Unix socket, counts as it stands.
    """
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return str(found)
    if found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return f"{IPv6Address(int(found) >> 64 << 64)}/64"


class Peer:
    """The connections of one peer address."""

    __slots__ = ("connections", "name", "waiting", "websockets")

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = self.websockets = 0
        self.waiting: dict[Connection, None] = {}
        """Connections without a complete request, the one that has waited longest first."""


class Peers:
    """The connections of all peers of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._peers: dict[str, Peer] = {}
        self._waiting: dict[Connection, None] = {}
        self.connections = 0

    def admit(self, connection: Connection, address: str) -> Peer:
        """Counts a new connection, which waits for a request. Raises ApiError 503 if there is no room for it."""
        name = peer_of(address)
        peer = self._peers.get(name) or Peer(name)
        if peer.connections >= self._limits.max_connections_per_peer and not _displace(peer.waiting):
            message = f"{peer.name} has {peer.connections} connections with requests here, as many as one address may"
            raise ApiError(503, f"{message}: wait for an answer, then try again", code="too_many_connections")
        if self.connections >= self._limits.max_connections and not _displace(self._waiting):
            raise ApiError(503, "there are too many connections: try again shortly", code="too_many_connections")
        peer = self._peers.setdefault(name, peer)  # Displacing its last connection may have removed it.
        peer.connections += 1
        self.connections += 1
        self.wait(connection, peer)
        return peer

    def wait(self, connection: Connection, peer: Peer) -> None:
        """Marks the connection as having no request that is being answered."""
        peer.waiting[connection] = self._waiting[connection] = None

    def serve(self, connection: Connection, peer: Peer) -> None:
        """Marks the connection as having a request that is being answered, so that it is not displaced."""
        peer.waiting.pop(connection, None)
        self._waiting.pop(connection, None)

    def upgrade(self, connection: Connection, peer: Peer) -> None:
        """Counts the connection as a WebSocket from now on. Raises ApiError 503 if the peer has too many of those."""
        if peer.websockets >= max(1, self._limits.max_connections_per_peer // WEBSOCKET_SHARE):
            message = f"{peer.name} has {peer.websockets} WebSockets here, as many as one address may: close one"
            raise ApiError(503, message, code="too_many_connections")
        peer.websockets += 1
        self.serve(connection, peer)

    def release(self, connection: Connection, peer: Peer, *, is_websocket: bool = False) -> None:
        """Stops counting the connection."""
        self.serve(connection, peer)
        peer.connections -= 1
        peer.websockets -= is_websocket
        self.connections -= 1
        if not peer.connections:
            self._peers.pop(peer.name, None)


def _displace(waiting: dict[Connection, None]) -> bool:
    """Closes the connection that has waited longest. Returns False if none waits."""
    oldest = next(iter(waiting), None)
    if oldest is None:
        return False
    oldest.displace()
    return True
