"""The seam by which others watch requests on their way. The pipeline reports steps, and does not know its observers.

All times are on the gateway's monotonic clock.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from mini_infer_gateway.routing.base import Decision
from mini_infer_web.asgi import Scope


class RequestTrace(Protocol):
    """Takes the steps of one request."""

    def tokenized(self, fields: Mapping[str, Any], prompt_tokens: int, now_s: float) -> None:
        """Records that the request is read. `fields` are those of its body; `prompt_tokens` may be an estimate."""

    def sent(self, decision: Decision, waited_s: float, now_s: float) -> None:
        """Records an attempt at the endpoints of `decision`, after `waited_s` in the queue."""

    def answered(self, now_s: float) -> None:
        """Records the first byte of the answer to the latest attempt."""

    def answered_whole(self, body: bytes) -> None:
        """Records that the client receives this answer at once."""

    def streams(self, progress: "StreamProgress") -> None:
        """Records that the client receives a stream whose progress is known."""

    def failed(self, reason: str, now_s: float) -> None:
        """Records that the latest attempt failed."""

    def ended(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Records the end of the request. `facts` are the fields of its log line."""


class StreamProgress(Protocol):
    """Reports how far a stream is."""

    @property
    def tokens(self) -> int:
        """The number of output tokens that the client has received."""
        ...


class RequestObserver(Protocol):
    """Observes the requests of one gateway."""

    def begin(self, scope: Scope, now_s: float) -> RequestTrace:
        """Returns the trace of a request that has just arrived."""
        ...


class _Traces:
    """Reports the steps of one request to several traces."""

    __slots__ = ("_traces",)

    def __init__(self, traces: Sequence[RequestTrace]) -> None:
        self._traces = traces

    def tokenized(self, fields: Mapping[str, Any], prompt_tokens: int, now_s: float) -> None:
        for trace in self._traces:
            trace.tokenized(fields, prompt_tokens, now_s)

    def sent(self, decision: Decision, waited_s: float, now_s: float) -> None:
        for trace in self._traces:
            trace.sent(decision, waited_s, now_s)

    def answered(self, now_s: float) -> None:
        for trace in self._traces:
            trace.answered(now_s)

    def answered_whole(self, body: bytes) -> None:
        for trace in self._traces:
            trace.answered_whole(body)

    def streams(self, progress: "StreamProgress") -> None:
        for trace in self._traces:
            trace.streams(progress)

    def failed(self, reason: str, now_s: float) -> None:
        for trace in self._traces:
            trace.failed(reason, now_s)

    def ended(self, facts: Mapping[str, Any], now_s: float) -> None:
        for trace in self._traces:
            trace.ended(facts, now_s)


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: RequestObserver) -> None:
        self._observers = observers

    def begin(self, scope: Scope, now_s: float) -> RequestTrace:
        """Returns a trace that reports to those of all observers that take an interest."""
        traces = [trace for one in self._observers if (trace := one.begin(scope, now_s)) is not NOBODY]
        return traces[0] if len(traces) == 1 else _Traces(traces)


class _Nobody:
    """Observes nothing, of any number of requests."""

    def begin(self, scope: Scope, now_s: float) -> RequestTrace:
        return self

    def tokenized(self, fields: Mapping[str, Any], prompt_tokens: int, now_s: float) -> None:
        pass

    def sent(self, decision: Decision, waited_s: float, now_s: float) -> None:
        pass

    def answered(self, now_s: float) -> None:
        pass

    def answered_whole(self, body: bytes) -> None:
        pass

    def streams(self, progress: StreamProgress) -> None:
        pass

    def failed(self, reason: str, now_s: float) -> None:
        pass

    def ended(self, facts: Mapping[str, Any], now_s: float) -> None:
        pass


NOBODY: Final = _Nobody()
"""The observer of a gateway that nobody watches."""
