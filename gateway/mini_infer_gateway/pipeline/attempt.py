"""One attempt at one endpoint: send the request, relay the answer; says what went wrong before the first byte.

Bytes are relayed as they come and untouched. After the first byte nothing is retried: an endpoint that dies in the
middle of an event stream ends it with an error event in OpenAI's shape. Which endpoint, and what next, is decided in
pipeline/generate.
"""

import json
from collections.abc import Callable
from enum import Enum

from mini_infer_contract.api_errors import ApiError
from mini_infer_contract.launch import DRAINING_HEADER, Endpoint
from mini_infer_gateway.http.asgi import ClientGoneError, Headers, Send
from mini_infer_gateway.http.upstream import ConnectError, Response, Upstream, UpstreamError, UpstreamTimeoutError
from mini_infer_gateway.settings import GatewaySettings

WHOLE_BYTES = 1 << 20
"""A response of known length up to this is read whole before it is sent on, so that until then it can be retried."""

_DRAINING = DRAINING_HEADER.encode()
_RETRYABLE = frozenset((502, 503, 504))
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_REQUEST_OWN = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}


class Failure(Enum):
    """Why an attempt failed before its first byte; the value is the metric's label."""

    CONNECT = "connect"
    BROKE = "broke"
    TIMEOUT = "timeout"
    DRAINING = "draining"
    STATUS = "status"


class AttemptError(Exception):
    """Nothing was sent to the client yet: another endpoint may be tried."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure


class Exchange:
    """One client's request across its attempts: who the client is, and whether it is still there."""

    def __init__(self, method: str, path: bytes, headers: Headers, body: bytes, send: Send) -> None:
        self.method, self.path, self.body, self.send = method, path, body, send
        self.headers = [(name, value) for name, value in headers if name not in _REQUEST_OWN]
        self.gone = False
        self.status = 0
        """Of the response that went to the client; 0: none did."""
        self._response: Response | None = None

    def abandon(self) -> None:
        """The client went: its endpoint must stop now."""
        self.gone = True
        if self._response:
            self._response.cut()

    async def attempt(
        self,
        upstream: Upstream,
        endpoint: Endpoint,
        extra_headers: Headers,
        settings: GatewaySettings,
        last: bool,
        on_first_byte: Callable[[], None],
    ) -> None:
        """Sends the request to `endpoint` and relays what it answers.

        Raises AttemptError while the client has seen nothing, UpstreamError when the endpoint failed later on (the
        client has been told), ClientGoneError. `last`: there is no other endpoint, so relay even a 503.
        """
        try:
            response = await self._open(upstream, endpoint, settings)
            try:
                if not last and response.status in _RETRYABLE:
                    draining = bool(response.header(_DRAINING))
                    failure = Failure.DRAINING if draining else Failure.STATUS
                    raise AttemptError(failure, f"{endpoint.name} answered {response.status}")
                await self._relay(response, extra_headers, settings, on_first_byte)
            finally:
                self._response = None
                response.close()
        except UpstreamError as error:
            if self.gone:
                raise ClientGoneError from None
            if self.status:
                raise
            raise AttemptError(_failure(error), f"{endpoint.name}: {error}") from error

    async def _open(self, upstream: Upstream, endpoint: Endpoint, settings: GatewaySettings) -> Response:
        return await upstream.request(
            endpoint.url,
            self.method,
            self.path,
            self.headers,
            self.body,
            settings.head_timeout_s,
            on_connection=self._remember,
        )

    def _remember(self, response: Response) -> None:
        self._response = response
        if self.gone:
            response.cut()

    async def _relay(
        self, response: Response, extra_headers: Headers, settings: GatewaySettings, on_first_byte: Callable[[], None]
    ) -> None:
        replaced = _HOP_BY_HOP.union(name for name, _ in extra_headers)
        headers = [header for header in response.headers if header[0] not in replaced] + extra_headers
        length = response.header(b"content-length")
        if length.isdigit() and int(length) <= WHOLE_BYTES:
            pieces = []
            while piece := await response.read(settings.idle_timeout_s):
                pieces.append(piece)
            on_first_byte()
            await self._start(response.status, headers)
            await self.send({"type": "http.response.body", "body": b"".join(pieces)})
            return
        # A stream's head goes out with its first piece, so that an endpoint that dies in between can be retried.
        piece = await response.read(settings.idle_timeout_s)
        on_first_byte()
        await self._start(response.status, headers)
        try:
            while piece:
                await self.send({"type": "http.response.body", "body": piece, "more_body": True})
                tail = piece
                piece = await response.read(settings.idle_timeout_s)
        except UpstreamError as error:
            if not self.gone and response.header(b"content-type").startswith(b"text/event-stream"):
                await self.send({"type": "http.response.body", "body": _error_event(tail, error)})
            raise
        await self.send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": headers})


def _failure(error: UpstreamError) -> Failure:
    if isinstance(error, ConnectError):
        return Failure.CONNECT
    return Failure.TIMEOUT if isinstance(error, UpstreamTimeoutError) else Failure.BROKE


def _error_event(tail: bytes, error: UpstreamError) -> bytes:
    body = ApiError(502, f"the endpoint failed in the middle of this answer: {error}", code="endpoint_failed").body()
    # Whatever event was cut off is ended first, so that ours is not read as part of it.
    separator = b"" if tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
    return separator + b"data: " + json.dumps(body).encode() + b"\n\n"
