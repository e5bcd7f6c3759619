"""A stream on its way from an endpoint to its client: each piece goes on in the callback that has received it.

No task wakes and no timer is set for a piece, as long as the client's connection takes what comes; where it does not,
nothing more is read until it does. Knows neither endpoints nor retries: what events mean is told by whoever relays.
"""

from collections.abc import Callable

from mini_infer_gateway.http.asgi import Sender
from mini_infer_gateway.http.sse import EventSplitter
from mini_infer_gateway.http.upstream import BrokenConnectionError, Response
from mini_infer_web.asgi import Send


class Relay:
    """Of one stream."""

    def __init__(
        self,
        send: Send,
        splitter: EventSplitter | None,
        read: Callable[[bytes], tuple[bytes, bool]],
        heard: Callable[[], None],
    ) -> None:
        """`splitter`: of event streams, of which only whole events go on; None: any bytes do.

        `read` says what of them the client gets, and whether they say that the engine has ended; `heard` is called when
        anything comes.
        """
        self._send, self._splitter, self._read, self._heard = send, splitter, read, heard
        self._try_chunk = send.try_chunk if isinstance(send, Sender) else None
        self._unsent = b""
        self._dead = False

    async def run(self, response: Response, piece: bytes, idle_timeout_s: float) -> None:
        """Relays `piece`, whole events that were read already, and what follows. UpstreamError: the endpoint failed."""
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
        """See `Response.pump`."""
        self._heard()
        piece = self._splitter.feed(data) if self._splitter else data
        return self._go_on(piece) if piece else True

    def _go_on(self, piece: bytes) -> bool:
        """Sends what the client gets of it; False: not without waiting, or there is nothing more to come."""
        events, self._dead = self._read(piece) if self._splitter else (piece, False)
        if events and (self._try_chunk is None or not self._try_chunk(events)):
            self._unsent = events
        return not (self._dead or self._unsent)
