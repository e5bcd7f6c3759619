"""Generates a response while no client waits for it: a task, its state in the store, events for clients that join.

Knows no sockets; an ASGI application generates.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from mini_infer_apis.dialects.response_object import with_error
from mini_infer_apis.stored_responses.broken_stream import StreamErrors
from mini_infer_apis.stored_responses.recorder import MAX_ERROR_BYTES, data_of, events_in, is_terminal
from mini_infer_apis.stored_responses.request import Turn
from mini_infer_apis.stored_responses.store import ResponseStore
from mini_infer_web.api_errors import ApiError
from mini_infer_web.asgi import Application, Message, Scope, error_in, receive_of

_EVICTED = {
    "code": "response_evicted",
    "message": "there was no memory left to keep this response's events: send the request again",
    "param": None,
}


class BackgroundResponse:
    """A response that is generated in the background, from its queued state to its end."""

    def __init__(
        self,
        store: ResponseStore,
        turn: Turn,
        response: dict[str, Any],
        clock: Callable[[], float],
        *,
        keeps_events: bool,
    ) -> None:
        self.response = response
        self.is_over = False
        self.client = turn.client
        self._store, self._turn, self._clock = store, turn, clock
        self._keeps_events = keeps_events
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._status = 0
        self._error_body = b""
        self._errors = StreamErrors()
        self._lost = False
        """True if the response was evicted from the store, so that its events are not there any more."""
        self._keep()

    async def run(self, generate: Application, scope: Scope, body: list[bytes]) -> None:
        """Generates the response; `body`, which asks for a stream, is taken out of its list."""
        try:
            await generate(scope, receive_of(body.pop(), self._until_cancelled), self._send)
            if not self.is_over:
                self._fail(ApiError(502, "the answer broke off"))
        except ApiError as error:
            self._fail(error)
        finally:
            if not self.is_over:
                self._fail(ApiError(500, "the server was stopped, or failed at this request"))

    def cancel(self) -> None:
        """Cancels the response; the output so far stays."""
        if not self.is_over:
            self._cancelled.set()
            self._end(self.response | {"status": "cancelled"})

    async def events(self, begin: int) -> AsyncIterator[bytes]:
        """Yields all events from this number on, as they come, until the response is over."""
        position = begin
        while True:
            if self._lost:
                yield b"event: error\ndata: %b\n\n" % msgspec.json.encode({"type": "error", **_EVICTED})
                return
            while position < len(self._events):
                yield self._events[position]
                position += 1
            if self.is_over:
                return
            self._changed.clear()
            await self._changed.wait()

    async def _until_cancelled(self) -> Message:
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.is_over:
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status != 200:
            self._error_body = (self._error_body + message.get("body", b""))[:MAX_ERROR_BYTES]
            if not message.get("more_body"):
                self._fail(error_in(self._error_body, self._status))
        else:
            for event in events_in(self._errors.translated(message.get("body", b""))):
                self._take(event)

    def _take(self, event: bytes) -> None:
        if self._keeps_events:
            self._events.append(event)
            self._keeps_events = self._store.has_grown(self.response["id"], len(event), self._clock())
            if not self._keeps_events:
                self._drop_events()
        if is_terminal(event):
            self._end(self.response | msgspec.json.decode(data_of(event))["response"])
        elif self.response["status"] == "queued":
            self.response["status"] = "in_progress"
            self._keep()
        self._changed.set()

    def _drop_events(self) -> None:
        """Frees the events of a response that was evicted; clients that follow it get an error in place of the rest."""
        self._events.clear()
        self._lost = True
        self._changed.set()

    def _fail(self, error: ApiError) -> None:
        self._end(with_error(self.response, error.status, error.code, error.message))
        content = {"type": "response.failed", "response": self.response, "sequence_number": len(self._events)}
        self._events.append(b"event: response.failed\ndata: %b\n\n" % msgspec.json.encode(content))

    def _end(self, response: dict[str, Any]) -> None:
        self.is_over = True
        self.response = response | {"id": self.response["id"], "background": True}
        if self.response["status"] == "completed":
            self.response.setdefault("completed_at", int(time.time()))
        self._keep()
        self._changed.set()

    def _keep(self) -> None:
        entry = self._turn.entry(self.response)
        entry.events = self._events if self._keeps_events else None
        entry.event_bytes = sum(map(len, self._events))
        self._store.put(entry, self._clock())
