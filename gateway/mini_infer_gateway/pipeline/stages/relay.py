"""Relays an endpoint's answer to the client, and reports to the endpoint's record how it ended.

A stream is relayed without a task that wakes or a timer that is set for each piece, as long as the client's connection
accepts the data: each piece is sent on in the callback that received it. If the connection does not accept it, nothing
more is read until it does.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from mini_infer_gateway.fleet.attempt_record import AttemptRecord
from mini_infer_gateway.fleet.breaker import Cause
from mini_infer_gateway.http.asgi import Sender
from mini_infer_gateway.http.headers import to_client
from mini_infer_gateway.http.sse import EventSplitter, has_error, may_have_error
from mini_infer_gateway.http.upstream import BrokenConnectionError, Response
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.continuation.base import NO_CONTINUATION, split_engine_death
from mini_infer_gateway.pipeline.stages.response_start import ResponseStart
from mini_infer_web.api_errors import ApiError
from mini_infer_web.asgi import PIECE_BYTES, Send


async def relay(call: Call, start: ResponseStart, record: AttemptRecord, idle_timeout_s: float) -> None:
    """Relays a whole answer. Raises UpstreamError."""
    exchange = call.exchange
    exchange.keepalive.stop()
    if not start.is_stream:
        call.continuation = NO_CONTINUATION
        if exchange.keepalive.begun:
            exchange.status, exchange.in_band_error = start.status, True
            await exchange.send_error_event(_as_error(start))
            return
    exchange.is_events = start.splitter is not None
    headers = to_client(start.response.headers, exchange.decision_headers)
    if start.is_whole:
        call.trace.answered_whole(start.body)
        if len(start.body) <= PIECE_BYTES:
            await exchange.send_whole(start.status, headers, start.body)
        else:
            with call.reservation.charged(len(start.body)):
                await exchange.send_whole(start.status, headers, start.body)
    else:
        if call.continuation is not NO_CONTINUATION:
            call.trace.streams(call.continuation)
        await exchange.send_head(start.status, headers)
        await _relay_stream(call, start, record, idle_timeout_s)
    if exchange.in_band_error:
        record.failed(Cause.STATUS)
    elif not start.failure:
        record.succeeded()


async def relay_rest(call: Call, start: ResponseStart, record: AttemptRecord, idle_timeout_s: float) -> None:
    """Relays the rest of a stream whose beginning came from another endpoint. Raises UpstreamError."""
    record.first_byte(start.status)
    await _relay_stream(call, start, record, idle_timeout_s)
    record.succeeded()


async def _relay_stream(call: Call, start: ResponseStart, record: AttemptRecord, idle_timeout_s: float) -> None:
    stream = Relay(call.exchange.send, start.splitter, partial(_for_client, call), record.byte)
    await stream.run(start.response, start.body, idle_timeout_s)


def _for_client(call: Call, events: bytes) -> tuple[bytes, bool]:
    """Returns what the client receives of whole events, and True if they report that the engine has ended."""
    continuation = call.continuation
    if not may_have_error(events):
        return continuation.take(events), continuation.differs
    before, dead = split_engine_death(events)
    taken = continuation.take(before)
    if continuation.differs or (dead and continuation.possible):
        return taken, True
    events = taken + events[len(before) :]
    call.exchange.in_band_error |= has_error(events)
    return events, False


class Relay:
    """The relay of one stream."""

    def __init__(
        self,
        send: Send,
        splitter: EventSplitter | None,
        filter_events: Callable[[bytes], tuple[bytes, bool]],
        on_data: Callable[[], None],
    ) -> None:
        """`splitter` is that of an event stream, of which only whole events are sent on; if None, any bytes are.

        `filter_events` returns the part of the events that the client receives, and True if they report that the engine
        has ended. `on_data` is called whenever data arrives.
        """
        self._send, self._splitter, self._filter, self._on_data = send, splitter, filter_events, on_data
        self._try_chunk = send.try_chunk if isinstance(send, Sender) else None
        self._unsent = b""
        self._dead = False

    async def run(self, response: Response, piece: bytes, idle_timeout_s: float) -> None:
        """Relays `piece`, whole events that were read already, and all that follows. Raises UpstreamError."""
        self._on_data()
        self._forward(piece)
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
        self._on_data()
        piece = self._splitter.feed(data) if self._splitter else data
        return self._forward(piece) if piece else True

    def _forward(self, piece: bytes) -> bool:
        """Forwards the client's part of `piece`. Returns False if its buffer is full or the engine has ended."""
        events, self._dead = self._filter(piece) if self._splitter else (piece, False)
        if events and (self._try_chunk is None or not self._try_chunk(events)):
            self._unsent = events
        return not (self._dead or self._unsent)


class _ErrorBody(msgspec.Struct):
    error: dict[str, Any]


def _as_error(start: ResponseStart) -> ApiError:
    """Converts a response that is not a stream to an error, for a client whose stream has begun."""
    status, error = start.status, dict[str, Any]()
    if start.is_whole:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            error = msgspec.json.decode(start.body, type=_ErrorBody).error
    message, code, param = error.get("message"), error.get("code"), error.get("param")
    return ApiError(
        status if status >= 400 else 502,
        message if isinstance(message, str) else f"the endpoint answered {status} where a stream should have begun",
        code=code if isinstance(code, str) else "endpoint_failed",
        param=param if isinstance(param, str) else None,
    )
