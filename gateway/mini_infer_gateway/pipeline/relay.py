"""Relays a stream from an endpoint to its client: each piece is sent on in the callback that received it.

No task wakes and no timer is set for a piece, as long as the client's connection accepts the data. If it does not,
nothing more is read until it does. This module knows neither endpoints nor retries: the caller interprets the events.
"""

from collections.abc import Callable

from mini_infer_gateway.http.asgi import Sender
from mini_infer_gateway.http.sse import EventSplitter
from mini_infer_gateway.http.upstream import BrokenConnectionError, Response
from mini_infer_web.asgi import Send


class Relay:
    """The relay of one stream."""

    def __init__(
        self,
        send: Send,
        splitter: EventSplitter | None,
        read: Callable[[bytes], tuple[bytes, bool]],
        heard: Callable[[], None],
    ) -> None:
        """`splitter` is that of an event stream, of which only whole events are sent on; if None, any bytes are.

        `read` returns the part of the events that the client receives, and True if they report that the engine has
        ended. `heard` is called whenever data arrives.
        """
        self._send, self._splitter, self._read, self._heard = send, splitter, read, heard
        self._try_chunk = send.try_chunk if isinstance(send, Sender) else None
        self._unsent = b""
        self._dead = False

    async def run(self, response: Response, piece: bytes, idle_timeout_s: float) -> None:
        """Relays `piece`, whole events that were read already, and all that follows. Raises UpstreamError."""
        self._heard()
        self._go_on(piece)
        while True:
            if self._unsent:
                await self._send({"type": "http.response.body", "body": self._unsent, "more_body": True})
                self._unsent = b""
            if self._dead:
                raise BrokenConnectionError("its engine has ended")
            if not await response.pump(self._take, idle_timeout_s):
                break
        rest = self._splitter.rest() if self._splitter else b""
        await self._send({"type": "http.response.body", "body": rest})

    def _take(self, data: bytes) -> bool:
        """Relays received data. Returns False to stop reading: the client's buffer is full or the engine has ended."""
        self._heard()
        piece = self._splitter.feed(data) if self._splitter else data
        return self._go_on(piece) if piece else True

    def _go_on(self, piece: bytes) -> bool:
        """Sends on the client's part of `piece`. Returns False if its buffer is full or the engine has ended."""
        events, self._dead = self._read(piece) if self._splitter else (piece, False)
        if events and (self._try_chunk is None or not self._try_chunk(events)):
            self._unsent = events
        return not (self._dead or self._unsent)
