"""Bounds the memory that waits for clients that do not read: of many such connections, the oldest are ended.

A client that reads, however slowly, becomes the youngest again each time that its connection takes more.
"""

from typing import Protocol

from mini_infer_web.http_server.limits import MAX_SLOW_READERS


class SlowReader(Protocol):
    """A connection whose client does not take what is sent to it."""

    def abort_for_memory(self) -> None:
        """Ends the connection: the memory that waits for its client is needed."""


class SlowReaders:
    """The connections of one server whose clients do not read now, by peer."""

    def __init__(self, most: int = MAX_SLOW_READERS) -> None:
        self._most = most
        self._by_peer: dict[str, dict[SlowReader, None]] = {}
        self._count = 0

    def add(self, connection: SlowReader, peer: str) -> None:
        """Counts a connection. If there are too many, the peer with the most of them loses the oldest of its own."""
        own = self._by_peer.setdefault(peer, {})
        if connection in own:
            return
        own[connection] = None
        self._count += 1
        if self._count > self._most:
            largest = max(self._by_peer, key=lambda name: len(self._by_peer[name]))
            oldest = next(iter(self._by_peer[largest]))
            self.remove(oldest, largest)
            oldest.abort_for_memory()

    def remove(self, connection: SlowReader, peer: str) -> None:
        """Stops counting a connection, if it is counted."""
        own = self._by_peer.get(peer)
        if own is None or connection not in own:
            return
        del own[connection]
        self._count -= 1
        if not own:
            del self._by_peer[peer]
