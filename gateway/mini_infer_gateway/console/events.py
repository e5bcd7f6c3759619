"""Streams the fleet and new requests to open consoles as server-sent events. One computation serves all of a kind."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from mini_infer_gateway.console.viewer import Viewer
from mini_infer_gateway.http.asgi import client_disconnected
from mini_infer_web.api_errors import ApiError
from mini_infer_web.asgi import STREAM_HEADERS, Receive, Send

MAX_STREAMS: Final = 64
"""Consoles that are open at once; one more gets 429."""
MAX_STREAMS_PER_KEY: Final = 16
"""Consoles that one key has open at once; one more gets 429."""
MAX_NEW_REQUESTS: Final = 200
"""New requests in one event: of more, the newest."""

MakeEvents = Callable[[Viewer, int, bool], tuple[bytes, int]]
"""Returns events for a viewer that has seen requests up to this serial, and the serial that it has seen then. The last
argument is True for a stream's first events.
"""


def event(name: str, data: object) -> bytes:
    """Returns one server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


class EventStreams:
    """The streams of all open consoles."""

    def __init__(self, make: MakeEvents) -> None:
        self._make = make
        self._open: Counter[str] = Counter()
        self._tick = asyncio.Event()
        self._made: dict[tuple[Viewer, int], tuple[bytes, int]] = {}
        """Events of the present tick by viewer and serial: consoles that have seen the same get the same bytes."""
        self._ended = False

    @property
    def open(self) -> int:
        """The number of open streams."""
        return self._open.total()

    def tick(self) -> None:
        """Lets each stream send what is new."""
        self._made.clear()
        tick, self._tick = self._tick, asyncio.Event()
        tick.set()

    def end(self) -> None:
        """Ends all streams, since the gateway stops."""
        self._ended = True
        self.tick()

    async def serve(
        self, viewer: Viewer, receive: Receive, send: Send, may_go_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Streams until the client has gone, or `may_go_on` returns False since its key has lost its rights.

        Raises ApiError 429 if too many consoles are open.
        """
        if self.open >= MAX_STREAMS or self._open[viewer.key] >= MAX_STREAMS_PER_KEY:
            raise ApiError(429, "too many consoles are open: close one", code="too_many_consoles")
        self._open[viewer.key] += 1
        gone = asyncio.create_task(client_disconnected(receive), name="a console's client")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await self._stream(viewer, gone, send, may_go_on)
            with contextlib.suppress(OSError):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._open[viewer.key] -= 1
            if not self._open[viewer.key]:
                del self._open[viewer.key]

    async def _stream(
        self, viewer: Viewer, gone: "asyncio.Task[None]", send: Send, may_go_on: Callable[[], bool]
    ) -> None:
        events, seen = self._make(viewer, 0, True)
        while True:
            tick = self._tick
            await send({"type": "http.response.body", "body": events, "more_body": True})
            if not self._ended and not gone.done():
                waiting = asyncio.create_task(tick.wait())
                await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
            if self._ended or gone.done() or not may_go_on():
                return
            events, seen = self._made.get((viewer, seen)) or self._make_once(viewer, seen)

    def _make_once(self, viewer: Viewer, seen: int) -> tuple[bytes, int]:
        made = self._made[viewer, seen] = self._make(viewer, seen, False)
        return made
