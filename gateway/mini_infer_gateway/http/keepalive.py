"""Keeps a stream's connection alive while there is nothing to stream yet: proxies cut what is silent for a minute.

A stream that waits for longer than the interval is begun with a comment of server-sent events, and gets one more each
interval. Until then nothing has been sent, so that an error has its own status; afterwards it is told as an event.
"""

import asyncio

from mini_infer_contract.launch import KEEPALIVE_COMMENT
from mini_infer_web.asgi import Headers, Send

STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class KeepAlive:
    """Of one request. To be stopped before anything else is sent."""

    def __init__(self, send: Send, interval_s: float) -> None:
        """`interval_s`, 0: never, such as for what is no stream."""
        self._send, self._interval_s = send, interval_s
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.begun = False
        """The client has a head, 200, and comments."""

    def start(self) -> None:
        """The request begins to wait."""
        if self._interval_s > 0:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._begin)

    def stop(self) -> None:
        """It waits no longer."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._task:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._run(), name="keep a stream alive")

    async def _run(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        self.begun = True
        while True:
            await self._send({"type": "http.response.body", "body": KEEPALIVE_COMMENT, "more_body": True})
            await asyncio.sleep(self._interval_s)
