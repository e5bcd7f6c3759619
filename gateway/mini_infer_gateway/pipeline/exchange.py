"""The bytes and the connections of one request: what goes to an endpoint, and what its client receives.

Knows neither endpoints nor retries: the stages decide what is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from mini_infer_gateway.http.asgi import send_error, send_whole
from mini_infer_gateway.http.keepalive import KeepAlive
from mini_infer_gateway.http.upstream import Response
from mini_infer_gateway.metrics import Outcome, outcome_of
from mini_infer_web.api_errors import ApiError, ErrorShape
from mini_infer_web.asgi import Headers, Send


@dataclass(slots=True, eq=False)
class Exchange:
    """The client's connection, the connection to the current endpoint, and the request's bytes for that endpoint."""

    send: Send
    request_id: str
    errors: ErrorShape
    keepalive: KeepAlive = field(init=False)

    # Filled by `resolve`.
    method: str = ""
    target: bytes = b""
    """Path with its query, as the endpoint receives it."""
    headers: Headers = field(default_factory=list)
    """Headers for every endpoint."""

    # Filled for each attempt.
    body: bytes = b""
    hints: Headers = field(default_factory=list)
    """Additional headers for the current endpoint."""
    decision_headers: Headers = field(default_factory=list)
    """Headers by which the client learns of the routing decision."""
    response: Response | None = None
    """The response of the current endpoint; None if no attempt has a connection."""

    status: int = 0
    """HTTP status of the response that went to the client; 0 if none did."""
    is_events: bool = False
    """True if that response is an event stream."""
    in_band_error: bool = False
    """True if the endpoint reported an error in the middle of a stream."""
    abandoned: bool = False
    """True once the client has disconnected, or `expired` is set."""
    expired: ApiError | None = None
    """The reason why the exchange was abandoned although its client is still connected."""
    on_abandon: Callable[[], None] = field(default_factory=lambda: _nothing)
    """Called when the exchange is abandoned: it ends the wait of a request that has no endpoint yet."""

    def __post_init__(self) -> None:
        self.keepalive = KeepAlive(self.send)

    @property
    def outcome(self) -> Outcome:
        """The outcome of an answer that was relayed to its end."""
        return Outcome.IN_BAND_ERROR if self.in_band_error else outcome_of(self.status)

    def abandon(self) -> None:
        """Stops the endpoint's work at once, because the client has disconnected."""
        self.abandoned = True
        self.on_abandon()
        self.cut()

    def expire(self, error: ApiError) -> None:
        """Ends the exchange because it took too long, as if its client had disconnected; the client gets `error`."""
        self.expired = error
        self.abandon()

    def cut(self) -> None:
        """Cuts the connection to the current endpoint, if there is one."""
        if self.response:
            self.response.cut()

    def close(self) -> None:
        """Drops the callback when the exchange is over: it refers back to it, and would leave a reference cycle."""
        self.on_abandon = _nothing

    async def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a whole response; a stream that began with comments gets the body alone."""
        self.status = status
        if self.keepalive.begun:
            await self.send({"type": "http.response.body", "body": body})
        else:
            await send_whole(self.send, status, headers, body)

    async def send_head(self, status: int, headers: Headers) -> None:
        """Sends the head of a response, unless a stream began with comments."""
        self.status = status
        if not self.keepalive.begun:
            await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_error(self, error: ApiError) -> None:
        """Reports `error` as a response, or as an event if a stream has begun. Any other answer stays truncated."""
        self.keepalive.stop()
        if self.is_events or (self.keepalive.begun and not self.status):
            await self.send_error_event(error)
        elif not self.status:
            await send_error(self.send, error, self.request_id, self.errors)

    async def send_error_event(self, error: ApiError) -> None:
        """Ends an event stream with an error event."""
        await self.send({"type": "http.response.body", "body": self.errors.event(error, self.request_id)})


def _nothing() -> None:
    pass
