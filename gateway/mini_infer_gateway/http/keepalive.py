"""Keeps a stream's connection alive while there is nothing to stream yet: proxies cut connections after a silent
minute.

A stream that waits for longer than the interval begins with a comment of server-sent events, and gets another one each
interval. Until then nothing has been sent, so that an error has its own status; afterwards an error is sent as an
event.
"""

import asyncio

from mini_infer_web.asgi import KEEPALIVE_COMMENT, UNBUFFERED_STREAM_HEADERS, Send


class KeepAlive:
    """Keeps the connection of one request alive. Call `stop` before anything else is sent."""

    def __init__(self, send: Send) -> None:
        self._send, self._interval_s = send, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.begun = False
        """True once the client has received a head with status 200 and comments."""

    def start(self, interval_s: float) -> None:
        """Starts the interval, as a stream begins to wait; with 0, no comment is sent."""
        if interval_s > 0:
            self._interval_s = interval_s
            self._timer = asyncio.get_running_loop().call_later(interval_s, self._begin)

    def stop(self) -> None:
        """Stops the comments, as the request no longer waits."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._task:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name="keep a stream alive")

    async def _run(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": UNBUFFERED_STREAM_HEADERS})
        self.begun = True
        while True:
            await self._send({"type": "http.response.body", "body": KEEPALIVE_COMMENT, "more_body": True})
            await asyncio.sleep(self._interval_s)
