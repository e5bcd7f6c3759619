"""Watches a request's client while the request is served: its connection, its time limit, and its comments."""

import asyncio
from collections.abc import Callable
from math import inf

from mini_infer_gateway.http.asgi import client_disconnected
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_web.asgi import Receive
from mini_infer_web.http_server.client_link import CLIENT_LINK, ClientLink
from mini_infer_web.request_timeout import timed_out


class ClientWatch:
    """A context in which a request is abandoned as soon as its client disconnects or its time is over."""

    __slots__ = ("_call", "_link", "_serving", "_timer")

    def __init__(self, call: Call, serving: Serving) -> None:
        """The body of `call` must have been read."""
        self._call, self._serving = call, serving
        self._link: ClientLink | MessageLink = call.scope.get(CLIENT_LINK) or MessageLink(call.receive)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        call, exchange = self._call, self._call.exchange
        self._link.watch(exchange.abandon)
        if call.row.generates and call.fields.get("stream") is True:
            exchange.keepalive.start(self._serving.settings.sse_keepalive_s)
        if call.timeout_s < inf:
            left_s = max(0.0, call.arrived_s + call.timeout_s - self._serving.clock())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(left_s, exchange.expire, timed_out(call.timeout_s))

    def __exit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()
        self._call.exchange.keepalive.stop()
        self._link.unwatch()
        self._call.exchange.close()


class MessageLink:
    """Stands in for a `ClientLink` where the server has none: a task waits for the ASGI message of a disconnect."""

    __slots__ = ("_on_loss", "_receive", "_task")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Calls `on_loss` when the client disconnects. Call it when the body has been read."""
        self._on_loss = on_loss
        self._task = asyncio.create_task(client_disconnected(self._receive))
        self._task.add_done_callback(self._ended)

    def unwatch(self) -> None:
        """Ends the task: the request is over."""
        self._task.remove_done_callback(self._ended)
        self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._on_loss()
