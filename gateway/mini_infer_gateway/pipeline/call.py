"""The one carrier of a request through all stages. A comment at each group of fields says which stage fills it.

A request is described by few other objects, each of which another part of the gateway owns: `Exchange` has its
connections, `RoutingRequest` is what routing may know of it, `Placement` is its entry in the load ledger, and
`Continuation` is the state of its stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from mini_infer_gateway.fleet.return_times import NOT_EXPECTED, Expected, RequestKind, Return
from mini_infer_gateway.memory import BodyReservation
from mini_infer_gateway.metrics import Outcome
from mini_infer_gateway.paths import EnginePath
from mini_infer_gateway.pipeline.clients import ANYBODY, Client
from mini_infer_gateway.pipeline.continuation.base import NO_CONTINUATION, Continuation
from mini_infer_gateway.pipeline.exchange import Exchange
from mini_infer_gateway.pipeline.observer import NOBODY, RequestTrace
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.routing.base import RoutingRequest
from mini_infer_web.asgi import Receive, Scope, Send

ACCESS_LOG_FIELDS = "mini_infer_access_log_fields"
"""Key in an ASGI scope: fields of the request's log line, in addition to those of its head."""
CLIENT_CLOSED_REQUEST = 499
"""Status of nginx for a client that closed the connection, used in metrics only; nobody receives it."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A request that another revision is to compute as well, as far as it is retained once it was answered."""

    service: str
    revision: str
    """The revision that gets the copy."""
    target: bytes
    body: bytes
    request: RoutingRequest
    mirrored: bool
    """True if the request is sent to it as it is."""
    replayed: bool
    """True if it is to score an answer to the request."""


@dataclass(slots=True, eq=False)
class Call:
    """A request in progress."""

    # From its arrival.
    row: EnginePath
    scope: Scope
    receive: Receive
    arrived_s: float
    exchange: Exchange
    reservation: BodyReservation
    log_fields: dict[str, Any]
    """Fields of the request's line in the access log."""
    trace: RequestTrace = NOBODY

    # Filled by `read`.
    body: bytes = b""
    """The client's body; empty once the answer has begun, unless another endpoint may have to continue it."""
    fields: dict[str, Any] = field(default_factory=dict)
    boundary: bytes = b""
    """The boundary between the parts of a form; empty if the body is JSON."""

    # Filled by `resolve`.
    model: str = ""
    """The model as the client wrote it, which is a name in the catalog; empty until it is known to be one."""
    placed_as: str = ""
    """The name under which the request is placed: that of its model, or of one engine that its client names."""
    endpoints: Sequence[str] = ()
    """Names of the endpoints that served the model when the request arrived."""
    client: Client = ANYBODY
    priority: int = 0
    """The request's priority in the queue; lower goes first."""
    queue_timeout_s: float = inf
    """Seconds that the client allows the request to wait for an endpoint with room."""
    first_token_target_s: float = inf
    """Seconds in which the client expects the first token."""
    timeout_s: float = inf
    """Seconds that the whole request may take; infinite if there is no limit."""
    retry_until_s: float = inf
    """Time after which the request is not sent to another endpoint."""
    kills: int = 0
    """Number of engines that ended while they processed this request, including earlier submissions by the client."""

    # Filled by `tokenise`; each attempt that fails adds its endpoints to `attempted`.
    request: RoutingRequest = field(init=False)
    copy: Copy | None = None
    """The copy for a canary, until it is sent."""

    # Filled by `session_lease`.
    session: tuple[Sequence[bytes], str, RequestKind] | None = None
    """The keys of the prompt, its client and its kind, by which the session's next request is recognised."""
    continues: Return | None = None
    """The request that it continues; None if it begins a session."""
    expected: Expected = NOT_EXPECTED
    """The time at which the session is expected to return."""
    engines_id: str = ""
    """The id by which its engine knows it."""

    held_s: float = 0.0
    """Seconds for which `place` held it because its model had no engine."""

    # Filled by `attempt`.
    attempts: int = 0
    """Number of attempts begun so far."""
    continuation: Continuation = field(default_factory=lambda: NO_CONTINUATION)
    """The state with which another endpoint can continue the stream."""

    # For the metrics and the access log.
    status: int = CLIENT_CLOSED_REQUEST
    outcome: Outcome = Outcome.INTERNAL

    @classmethod
    def arrived(cls, row: EnginePath, scope: Scope, receive: Receive, send: Send, serving: Serving) -> "Call":
        """Returns a request of which nothing has been read but its head."""
        exchange = Exchange(send, scope["request_id"], row.errors)
        reservation = BodyReservation(serving.bodies, serving.clients.of(scope).pays_as(scope))
        arrived_s, log_fields = serving.clock(), scope.setdefault(ACCESS_LOG_FIELDS, {})
        trace = serving.observer.begin(scope, arrived_s) if row.generates else NOBODY
        return cls(row, scope, receive, arrived_s, exchange, reservation, log_fields, trace)

    @property
    def request_id(self) -> str:
        """The id in logs, headers and errors."""
        return self.exchange.request_id

    @property
    def can_resume(self) -> bool:
        """True if the client has received a part of a stream that another endpoint can continue."""
        return bool(self.exchange.status and self.continuation.possible)

    def begin_answer(self, retains_body: bool) -> None:
        """Frees the body as the answer begins, unless another endpoint may have to continue the answer."""
        if retains_body and self.continuation.possible:
            self.fields = {"model": self.model}
            return
        self.continuation = NO_CONTINUATION
        self.body = self.exchange.body = b""
        self.fields = {}
        self.reservation.release()

    def answered(self) -> None:
        """Records an answer that was relayed to its end."""
        self.status, self.outcome = self.exchange.status, self.exchange.outcome

    def failed(self, status: int, outcome: Outcome, detail: str = "") -> None:
        """Records a failure; `detail` is the error in the access log."""
        self.status, self.outcome = status, outcome
        if detail:
            self.log_fields["error"] = detail

    def close(self, serving: Serving) -> None:
        """Frees the request's memory, and records its end in the access log and the metrics."""
        self.reservation.release()
        self.log_fields.update(model=self.model, status=self.status, outcome=self.outcome.value)
        ended_s = serving.clock()
        if self.session is not None and self.status == 200:
            serving.returns.ended(*self.session, ended_s, self.engines_id, self.log_fields.get("endpoint", ""))
        self.trace.ended(self.log_fields, ended_s)
        serving.metrics.answered(self.model, self.status, self.outcome, ended_s - self.arrived_s)
