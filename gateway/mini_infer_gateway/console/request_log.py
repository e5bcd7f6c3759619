"""Records the latest requests with the times of their steps, at the least cost to each; `request_view` formats them.

A request in flight is a `Trace`. When it ends, a plain tuple of numbers and strings is left of it, which the garbage
collector need not scan and which keeps nothing of the request alive.
"""

import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple

from mini_infer_gateway.console.viewer import Viewer
from mini_infer_gateway.pipeline.observer import StreamProgress
from mini_infer_gateway.routing.base import Decision
from mini_infer_web.asgi import Scope

MAX_REQUESTS: Final = 1000
"""Finished requests that are kept; older ones are forgotten."""
MAX_FAILED_ATTEMPTS: Final = 10
"""Failed attempts that are kept of one request: the first ones."""
MAX_TEXT_CHARACTERS: Final = 1000
"""Characters that are kept of a prompt, if texts are kept at all."""
MAX_ERROR_CHARACTERS: Final = 300
USAGE_BYTES: Final = 1 << 10
"""Bytes at the end of a whole answer in which its usage is looked for."""
_USAGE_NAMES: Final = (b'"completion_tokens":', b'"output_tokens":')
_NUMBER: Final = re.compile(rb" ?(\d{1,15})(?!\d)")


class Attempt(NamedTuple):
    """One attempt at an endpoint. A record has plain tuples of these fields, since those are quicker to make."""

    sent_s: float
    waited_s: float
    """Seconds in the queue before it."""
    first_byte_s: float | None
    failed_s: float | None
    """The time at which it failed; None if it did not."""
    failure: str
    engine: str
    hit_tokens: int
    reason: str
    index_kind: str
    prefill: str
    prefill_reason: str
    fetch: str


class Record(NamedTuple):
    """A finished request. The log has plain tuples of these fields: the collector never scans those again."""

    serial: int
    request_id: str
    path: str
    arrived_s: float
    tokenized_s: float | None
    """The time at which it was read and tokenised; None if it was refused before."""
    ended_s: float
    model: str
    key: str
    status: int
    outcome: str
    error: str
    prompt_tokens: int
    completion_tokens: int | None
    """Number of output tokens; None if the gateway does not know it."""
    text: str
    attempts: tuple[tuple[Any, ...], ...]
    """Fields of each `Attempt`."""


class Trace:
    """A request in flight: a `RequestTrace`. Class attributes are the values of steps that have not come."""

    tokenized_s: float | None = None
    prompt_tokens = 0
    decision: Decision | None = None
    """The endpoints of the latest attempt."""
    progress: StreamProgress | None = None
    """The stream's progress, if the answer is one that reports it."""
    sent_s: float | None = None
    """The time at which the present attempt was sent; None if there is none."""
    waited_s = 0.0
    first_byte_s: float | None = None
    failures: tuple[tuple[Any, ...], ...] = ()
    """Fields of each `Attempt` that has failed."""
    completion_tokens: int | None = None
    """Number of output tokens, as the answer's usage reports it."""
    counted = 0
    """Number of output tokens that the history has counted already."""
    text = ""

    def __init__(self, log: "RequestLog", scope: Scope, now_s: float) -> None:
        self._log = log
        self._scope = scope
        self._arrived_s = now_s

    def tokenized(self, fields: Mapping[str, Any], prompt_tokens: int, now_s: float) -> None:
        """Records that the request is read."""
        self.prompt_tokens, self.tokenized_s = prompt_tokens, now_s
        if self._log.keeps_texts:
            self.text = text_of(fields)

    def sent(self, decision: Decision, waited_s: float, now_s: float) -> None:
        """Records an attempt."""
        self.decision, self.waited_s, self.sent_s = decision, waited_s, now_s

    def answered(self, now_s: float) -> None:
        """Records the first byte of the answer to the latest attempt."""
        self.first_byte_s = now_s

    def streams(self, progress: StreamProgress) -> None:
        """Keeps the progress of a stream."""
        self.progress = progress

    def answered_whole(self, body: bytes) -> None:
        """Records the usage of a whole answer."""
        self.progress, self.completion_tokens = None, completion_tokens_of(body)

    def failed(self, reason: str, now_s: float) -> None:
        """Records that the latest attempt failed."""
        if self.decision and self.sent_s is not None and len(self.failures) < MAX_FAILED_ATTEMPTS:
            self.failures += (self._attempt(self.decision, now_s, reason),)
        self.sent_s = self.first_byte_s = None

    def ended(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Records the end of the request."""
        get, scope, log, attempts = facts.get, self._scope, self._log, self.failures
        if self.progress:
            self.completion_tokens = self.progress.tokens
        if decision := self.decision:
            log.count(self, decision)
            if self.sent_s is not None:
                attempts += (self._attempt(decision, None, ""),)
        log.in_flight.discard(self)
        log.finished.append(
            (
                next(log.serials),
                scope["request_id"],
                scope["path"],
                self._arrived_s,
                self.tokenized_s,
                now_s,
                get("model", ""),
                get("key", ""),
                get("status", 0),
                get("outcome", ""),
                get("error", "")[:MAX_ERROR_CHARACTERS],
                self.prompt_tokens,
                self.completion_tokens,
                self.text,
                attempts,
            )
        )

    def _attempt(self, decision: Decision, failed_s: float | None, failure: str) -> tuple[Any, ...]:
        """Returns the fields of the present attempt as an `Attempt`."""
        prefill, fetch = decision.prefill, decision.fetch
        return (
            self.sent_s,
            self.waited_s,
            self.first_byte_s,
            failed_s,
            failure,
            decision.decode.name,
            decision.hit_tokens,
            decision.reason,
            decision.index,
            prefill.name if prefill else "",
            decision.prefill_reason,
            fetch.name if fetch else "",
        )


@dataclass(slots=True)
class EngineCounts:
    """Counts what has ended at one engine since the last sample."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    completion_tokens: int = 0


class RequestLog:
    """The requests in flight and the latest finished ones of one gateway: a `RequestObserver`."""

    def __init__(self, *, keeps_texts: bool = False) -> None:
        self.keeps_texts = keeps_texts
        self.in_flight: set[Trace] = set()
        self.serials = count(1)
        """Serial numbers of requests in the order of their ends."""
        self.clock_offset_s = time.time() - time.monotonic()
        """Seconds from the gateway's clock to that of the epoch."""
        self.finished: deque[tuple[Any, ...]] = deque(maxlen=MAX_REQUESTS)
        """Fields of each `Record`, oldest first."""
        self._counts: dict[str, EngineCounts] = {}

    def begin(self, scope: Scope, now_s: float) -> Trace:
        """Returns the trace of a request that has just arrived."""
        trace = Trace(self, scope, now_s)
        self.in_flight.add(trace)
        return trace

    def count(self, trace: Trace, decision: Decision) -> None:
        """Counts a request that has ended for its engine."""
        name, tokens = decision.decode.name, trace.completion_tokens
        counts = self._counts.get(name)
        if counts is None:
            counts = self._counts[name] = EngineCounts()
        counts.requests += 1
        counts.prompt_tokens += trace.prompt_tokens
        counts.hit_tokens += decision.hit_tokens
        if tokens:
            counts.completion_tokens += tokens - trace.counted

    def take_counts(self) -> dict[str, EngineCounts]:
        """Returns the counts since the last call by engine, with those tokens that streams in flight have sent."""
        counts, self._counts = self._counts, {}
        for trace in self.in_flight:
            if trace.progress and trace.decision and (tokens := trace.progress.tokens) > trace.counted:
                engine = counts.setdefault(trace.decision.decode.name, EngineCounts())
                engine.completion_tokens += tokens - trace.counted
                trace.counted = tokens
        return counts

    @property
    def latest(self) -> int:
        """The serial number of the request that ended last; 0 if none has."""
        return Record._make(self.finished[-1]).serial if self.finished else 0

    def records(self, viewer: Viewer, after: int = 0) -> Iterator[Record]:
        """Yields the requests that the viewer may see, with serials above `after`, newest first."""
        for fields in reversed(self.finished):
            record = Record._make(fields)
            if record.serial <= after:
                return
            if viewer.everything or viewer.owns(record.key):
                yield record


def completion_tokens_of(body: bytes) -> int | None:
    """Returns the number of output tokens in the usage at the end of a whole answer; None if there is none."""
    for name in _USAGE_NAMES:
        at = body.rfind(name, -USAGE_BYTES)
        if at >= 0 and (found := _NUMBER.match(body, at + len(name))):
            return int(found[1])
    return None


def text_of(fields: Mapping[str, Any]) -> str:
    """Returns the beginning of a request's last text: of its last message, its prompt, or its input."""
    content: Any = fields.get("prompt", fields.get("input", ""))
    messages = fields.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        content = messages[-1].get("content")
    if isinstance(content, list):
        parts = (part.get("text") if isinstance(part, dict) else part for part in content[:16])
        content = " ".join(part for part in parts if isinstance(part, str))
    return content[:MAX_TEXT_CHARACTERS] if isinstance(content, str) else ""
