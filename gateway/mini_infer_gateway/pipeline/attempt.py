"""Sends one attempt of a request to one endpoint, relays the answer, and reports what failed and when.

Bytes are relayed untouched as they arrive; event streams are relayed by whole events. If an endpoint dies in the middle
of an event stream, another endpoint continues the stream where that is possible; otherwise the stream ends with an
error event in the shape of its API. `generate` chooses the endpoint and the next step, `retries` decides whether a
failure may be tried elsewhere, and `continuation` knows what a continued stream needs.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from mini_infer_contract.launch import DRAINING_HEADER, KV_FALLBACK_HEADER, SLO_UNATTAINABLE_HEADER, Endpoint
from mini_infer_gateway.fleet.attempt_record import AttemptRecord
from mini_infer_gateway.fleet.breaker import Cause
from mini_infer_gateway.http.asgi import ClientGoneError, send_error, send_whole
from mini_infer_gateway.http.headers import retry_after_s, to_client
from mini_infer_gateway.http.keepalive import KeepAlive
from mini_infer_gateway.http.sse import EventSplitter, has_error, may_have_error, without_comments
from mini_infer_gateway.http.upstream import (
    BrokenConnectionError,
    ConnectError,
    MalformedResponseError,
    Response,
    Upstream,
    UpstreamError,
    UpstreamTimeoutError,
)
from mini_infer_gateway.pipeline.continuation import Continuation, split_engine_death
from mini_infer_gateway.pipeline.relay import Relay
from mini_infer_gateway.pipeline.retries import CAUSE, Failure
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.api_errors import OPENAI_ERRORS, ApiError, ErrorShape
from mini_infer_web.asgi import Headers, Send

WHOLE_BYTES = 1 << 20
"""Largest response of known length that is read whole before it is sent on: until then the request can be retried."""

_DRAINING, _KV_FALLBACK = DRAINING_HEADER.encode(), KV_FALLBACK_HEADER.encode()
_SLO_UNATTAINABLE = SLO_UNATTAINABLE_HEADER.encode()
_ENGINE_DEAD = b'"engine_dead"'
_SERVER_ERRORS = frozenset((500, 502, 503, 504))
_OVERLOADED = 429


class AttemptError(Exception):
    """An attempt failed before anything was sent to the client.

    `again` is True if another endpoint is to be tried, and False if no attempt is left.
    """

    def __init__(self, failure: Failure, detail: str, again: bool) -> None:
        super().__init__(detail)
        self.failure, self.again = failure, again


class StreamCutError(Exception):
    """A stream that can be continued lost its endpoint, and the client has not been notified.

    `died` is True if the connection broke, so that the request may be what ended the engine. `refused` is True if the
    endpoint does not accept such a request.
    """

    def __init__(self, detail: str, *, died: bool = False, refused: bool = False) -> None:
        super().__init__(detail)
        self.died, self.refused = died, refused


class Exchange:
    """A client's request across its attempts, with the state of the client's connection."""

    def __init__(
        self,
        method: str,
        path: bytes,
        headers: Headers,
        body: bytes,
        send: Send,
        keepalive: KeepAlive,
        request_id: str = "",
        errors: ErrorShape = OPENAI_ERRORS,
    ) -> None:
        """`headers` are for an endpoint, `path` includes the query, `keepalive` is of a stream that has not begun."""
        self.method, self.path, self.headers, self.body, self.send = method, path, headers, body, send
        self.keepalive = keepalive
        self.expired: ApiError | None = None
        """The reason why the exchange was abandoned although its client is still connected."""
        self._begin_by_s = 0.0
        self._request_id, self._errors = request_id, errors
        self.gone = False
        self.status = 0
        """HTTP status of the response that went to the client; 0 if none did."""
        self.hints: Headers = []
        """Headers that the gateway adds for this attempt's endpoint, in addition to `headers`."""
        self.kv_fallback = ""
        """The reason why the endpoint computed the prompt itself although another one was to; empty if none."""
        self.in_band_error = False
        """True if the endpoint reported an error in the middle of a stream."""
        self.continuation: Continuation | None = None
        """The state with which another endpoint can continue the stream; None if the stream cannot be continued."""
        self.retry: Callable[[Failure], bool] = _never
        """Decides if a failure is retried; set for each attempt, and called once for each failure."""
        self._is_events = False
        self.on_abandon: Callable[[], None] = _nothing
        """Called when the client disconnects: it ends the wait of a request that has no endpoint yet."""
        self._moved: Failure | None = None
        self._response: Response | None = None

    def abandon(self) -> None:
        """Stops the endpoint's work at once, because the client has disconnected."""
        self.gone = True
        self.on_abandon()
        if self._response:
            self._response.cut()

    def let_go(self) -> None:
        """Drops the callbacks when the exchange is over: they refer back to it, and would leave a reference cycle."""
        self.retry, self.on_abandon = _never, _nothing

    def expire(self, error: ApiError) -> None:
        """Ends the exchange because it took too long, as if its client had disconnected; the client gets `error`."""
        self.expired = error
        self.abandon()

    def move(self, reason: str) -> None:
        """Gives up the current endpoint for another one, if there is one and nothing is lost by it.

        `reason` is the value of a `Failure`.
        """
        failure = Failure(reason)
        if self.can_resume and not self.gone and self._response:
            self._moved = failure
            self._response.cut()
        elif not self.status and not self.gone and self._moved is None and self.retry(failure):
            self._moved = failure
            if self._response:
                self._response.cut()

    @property
    def can_resume(self) -> bool:
        """True if the client has received a part of a stream that another endpoint can continue."""
        return bool(self.status and self.continuation and self.continuation.possible)

    async def tell_broken(self, detail: str) -> None:
        """Ends an event stream that no endpoint can continue with an error event."""
        await self.tell_inside(_endpoint_failed(detail))

    async def tell(self, error: ApiError) -> None:
        """Reports `error` as a response, or as an event if a stream has begun. Any other answer stays truncated."""
        self.keepalive.stop()
        if self._is_events or (self.keepalive.begun and not self.status):
            await self.tell_inside(error)
        elif not self.status:
            await send_error(self.send, error, self._request_id, self._errors)

    async def tell_inside(self, error: ApiError) -> None:
        """Ends an event stream with an error event."""
        await self.send({"type": "http.response.body", "body": self._errors.event(error, self._request_id)})

    async def attempt(
        self,
        upstream: Upstream,
        endpoint: Endpoint,
        extra_headers: Headers,
        settings: GatewaySettings,
        head_timeout_s: float,
        record: AttemptRecord,
        on_first_byte: Callable[[int], None],
    ) -> None:
        """Sends the request to `endpoint` and relays the response.

        Raises AttemptError while the client has received nothing, UpstreamError if the endpoint failed later (the
        client has been notified), StreamCutError if it failed later and the stream can be continued (the client has not
        been notified, see `continuation`), and ClientGoneError. If no retry is left, the client receives even a 503,
        unless the 503 says that its engine has ended. `on_first_byte` is called with the status. A call after
        StreamCutError continues the stream.
        """
        self._moved = None
        self._begin_by_s = asyncio.get_running_loop().time() + head_timeout_s
        try:
            response = await upstream.request(
                endpoint.url,
                self.method,
                self.path,
                self.headers + self.hints,
                self.body,
                head_timeout_s,
                on_connection=self._remember,
            )
            try:
                await self._relay(response, endpoint, extra_headers, settings, record, on_first_byte)
            finally:
                self._response = None
                response.close()
        except UpstreamError as error:
            if self.gone:
                raise ClientGoneError from None
            if self.status:
                record.failed(CAUSE[_failure(error)])
                if self.can_resume:
                    died = isinstance(error, BrokenConnectionError) and self._moved is None
                    raise StreamCutError(f"{endpoint.name}: {error}", died=died) from error
                if self._is_events:
                    await self.tell_broken(str(error))
                raise
            raise self._failed(record, endpoint, error) from error

    def _failed(self, record: AttemptRecord, endpoint: Endpoint, error: UpstreamError) -> AttemptError:
        """Records an error that came before the first byte, and converts it to an AttemptError."""
        failure = self._moved or _failure(error)
        if failure in CAUSE:
            record.failed(CAUSE[failure])
        again = self._moved is not None or self.retry(failure)
        detail = f"moved away from it ({failure.value})" if self._moved else str(error)
        return AttemptError(failure, f"{endpoint.name}: {detail}", again)

    def _remember(self, response: Response) -> None:
        self._response = response
        if self.gone or self._moved:
            response.cut()

    async def _relay(
        self,
        response: Response,
        endpoint: Endpoint,
        extra_headers: Headers,
        settings: GatewaySettings,
        record: AttemptRecord,
        on_first_byte: Callable[[int], None],
    ) -> None:
        status = response.status
        # A stream's head goes out with its first piece, so that an endpoint that dies in between can be retried.
        splitter = EventSplitter() if _is_event_stream(response) else None
        body, complete = await self._beginning(response, splitter, settings, record)
        failure = _judged(response, body)
        if self.status:
            await self._go_on(response, body, splitter, endpoint, settings, record)
            return
        if failure:
            self._say(record, failure, response)
            again = self.retry(failure)
            if again or failure is Failure.DIED:
                raise AttemptError(failure, f"{endpoint.name} answered {status}", again)
        record.first_byte(status)
        self.kv_fallback = response.header(_KV_FALLBACK).decode("latin-1")
        on_first_byte(status)
        if splitter is None or status != 200:
            self.continuation = None
        self.keepalive.stop()
        if self.keepalive.begun and (splitter is None or status != 200):
            self.status, self.in_band_error = status, True
            await self.tell_inside(_error_of(status, body, complete))
            return
        self._is_events = splitter is not None
        headers = to_client(response.headers, extra_headers)
        if complete and not self.keepalive.begun:
            self.status = status
            await send_whole(self.send, status, headers, body)
        elif complete:
            self.status = status
            await self.send({"type": "http.response.body", "body": body})
        else:
            await self._start(status, headers)
            await Relay(self.send, splitter, self._events, record.byte).run(response, body, settings.idle_timeout_s)
        if self.in_band_error:
            record.failed(Cause.STATUS)
        elif not failure:
            record.succeeded()

    async def _go_on(
        self,
        response: Response,
        body: bytes,
        splitter: EventSplitter | None,
        endpoint: Endpoint,
        settings: GatewaySettings,
        record: AttemptRecord,
    ) -> None:
        """Relays the rest of a stream whose beginning came from another endpoint."""
        if response.status != 200 or splitter is None:
            failure = _judged(response, body)
            if failure:
                self._say(record, failure, response)
            status = response.status
            message = f"{endpoint.name} answered {status} where the stream should have gone on"
            raise StreamCutError(message, refused=400 <= status < 500 and status != _OVERLOADED)
        record.first_byte(response.status)
        await Relay(self.send, splitter, self._events, record.byte).run(response, body, settings.idle_timeout_s)
        record.succeeded()

    async def _beginning(
        self, response: Response, splitter: EventSplitter | None, settings: GatewaySettings, record: AttemptRecord
    ) -> tuple[bytes, bool]:
        """Returns the bytes to send with the head, and True if they are the whole body.

        The bytes are a small body as a whole, or the first piece of a stream.
        """
        length = response.header(b"content-length")
        piece = await response.read(settings.idle_timeout_s)
        if not (length.isdigit() and int(length) <= WHOLE_BYTES):
            return await self._first_events(response, splitter, piece, settings) if splitter else (piece, not piece)
        pieces = []
        while piece:
            record.byte()
            pieces.append(piece)
            piece = await response.read(settings.idle_timeout_s)
        return b"".join(pieces), True

    async def _first_events(
        self, response: Response, splitter: EventSplitter, piece: bytes, settings: GatewaySettings
    ) -> tuple[bytes, bool]:
        """Reads up to the first whole event. Comments before it are dropped: they only show a live endpoint."""
        while piece:
            if events := without_comments(splitter.feed(piece)):
                return events, False
            left_s = self._begin_by_s - asyncio.get_running_loop().time()
            piece = await response.read(min(settings.idle_timeout_s, max(0.0, left_s)))
        return splitter.rest(), True

    def _events(self, events: bytes) -> tuple[bytes, bool]:
        """Returns what the client receives of whole events, and True if they report that the engine has ended."""
        if self.continuation is None:
            self.in_band_error |= has_error(events)
            return events, False
        if not may_have_error(events):
            return self.continuation.take(events), self.continuation.differs
        told, dead = split_engine_death(events)
        taken = self.continuation.take(told)
        if self.continuation.differs:
            return taken, True
        if dead and self.continuation.possible:
            return taken, True
        events = taken + events[len(told) :]
        self.in_band_error |= has_error(events)
        return events, False

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        if not self.keepalive.begun:
            await self.send({"type": "http.response.start", "status": status, "headers": headers})

    def _say(self, record: AttemptRecord, failure: Failure, response: Response) -> None:
        if failure is Failure.OVERLOADED:
            record.overloaded(retry_after_s(response.header(b"retry-after")))
        elif failure is Failure.UNATTAINABLE:
            record.succeeded()
        elif failure is Failure.DRAINING:
            record.draining()
        else:
            record.failed(CAUSE[failure])


def _never(_: Failure) -> bool:
    return False


def _nothing() -> None:
    pass


def _judged(response: Response, body: bytes) -> Failure | None:
    """Returns the failure of the endpoint that a response shows; None if nothing is wrong with the endpoint."""
    if response.status == _OVERLOADED:
        return Failure.UNATTAINABLE if response.header(_SLO_UNATTAINABLE) else Failure.OVERLOADED
    if response.status not in _SERVER_ERRORS:
        return None
    if response.header(_DRAINING):
        return Failure.DRAINING
    return Failure.DIED if _ENGINE_DEAD in body else Failure.STATUS


def _failure(error: UpstreamError) -> Failure:
    if isinstance(error, ConnectError):
        return Failure.CONNECT
    if isinstance(error, MalformedResponseError):
        return Failure.MALFORMED
    return Failure.TIMEOUT if isinstance(error, UpstreamTimeoutError) else Failure.BROKE


def _endpoint_failed(detail: str) -> ApiError:
    return ApiError(502, f"the endpoint failed in the middle of this answer: {detail}", code="endpoint_failed")


def _error_of(status: int, body: bytes, complete: bool) -> ApiError:
    """Converts an endpoint's response that is not a stream to an error, for a client whose stream has begun."""
    told: dict[str, Any] = {}
    if complete:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            told = msgspec.json.decode(body, type=_Told).error
    message, code, param = told.get("message"), told.get("code"), told.get("param")
    return ApiError(
        status if status >= 400 else 502,
        message if isinstance(message, str) else f"the endpoint answered {status} where a stream should have begun",
        code=code if isinstance(code, str) else "endpoint_failed",
        param=param if isinstance(param, str) else None,
    )


class _Told(msgspec.Struct):
    error: dict[str, Any]


def _is_event_stream(response: Response) -> bool:
    return response.header(b"content-type").lower().startswith(b"text/event-stream")
