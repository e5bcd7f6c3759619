"""Records the latest requests with the times of their steps, at the least cost to each; `request_view` formats them.

A request in flight is a `Trace`. When it ends, a row in a `RecordRing` is left of it.
"""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, Final

from mini_infer_gateway.console.record_ring import Attempt, Record, RecordRing, Rest, known
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


class Trace:
    """A request in flight: a `RequestTrace`."""

    __slots__ = (
        "_arrived_s",
        "_failures",
        "_first_byte_s",
        "_log",
        "_scope",
        "_sent_s",
        "_text",
        "_tokenized_s",
        "_waited_s",
        "completion_tokens",
        "counted",
        "decision",
        "progress",
        "prompt_tokens",
    )

    def __init__(self, log: "RequestLog", scope: Scope, now_s: float) -> None:
        self._log = log
        self._scope = scope
        self._arrived_s = now_s
        self._tokenized_s = self._sent_s = self._first_byte_s = nan
        self._waited_s = 0.0
        self._failures: tuple[Attempt, ...] = ()
        self._text = ""
        self.prompt_tokens = 0
        self.decision: Decision | None = None
        """The endpoints of the latest attempt."""
        self.progress: StreamProgress | None = None
        """The stream's progress, if the answer is one that reports it."""
        self.completion_tokens = -1
        """Number of output tokens, as the answer's usage reports it; -1 until it does."""
        self.counted = 0
        """Number of output tokens that the history has counted already."""

    def tokenized(self, fields: Mapping[str, Any], prompt_tokens: int, now_s: float) -> None:
        """Records that the request is read."""
        self.prompt_tokens, self._tokenized_s = prompt_tokens, now_s
        if self._log.keeps_texts:
            self._text = text_of(fields)

    def sent(self, decision: Decision, waited_s: float, now_s: float) -> None:
        """Records an attempt."""
        self.decision, self._waited_s, self._sent_s = decision, waited_s, now_s

    def answered(self, now_s: float) -> None:
        """Records the first byte of the answer to the latest attempt."""
        self._first_byte_s = now_s

    def streams(self, progress: StreamProgress) -> None:
        """Keeps the progress of a stream."""
        self.progress = progress

    def answered_whole(self, body: bytes) -> None:
        """Records the usage of a whole answer."""
        self.progress, self.completion_tokens = None, completion_tokens_of(body)

    def failed(self, reason: str, now_s: float) -> None:
        """Records that the latest attempt failed."""
        decision, sent_s = self.decision, self._sent_s
        if decision and not isnan(sent_s) and len(self._failures) < MAX_FAILED_ATTEMPTS:
            times = sent_s, self._waited_s, known(self._first_byte_s), now_s
            self._failures += (_failed_attempt(decision, *times, reason),)
        self._sent_s = self._first_byte_s = nan

    def ended(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Records the end of the request."""
        get, scope, log, decision = facts.get, self._scope, self._log, self.decision
        if self.progress:
            self.completion_tokens = self.progress.tokens
        log.in_flight.discard(self)
        engine = reason = index_kind = prefill_name = prefill_reason = fetch_name = ""
        hit_tokens = host_tokens = disk_tokens = 0
        rest = None
        if decision:
            log.count(self, decision)
            engine, hit_tokens, reason = decision.decode.name, decision.hit_tokens, decision.reason
            host_tokens, disk_tokens = decision.host_tokens, decision.disk_tokens
            index_kind, prefill, prefill_reason = decision.index, decision.prefill, decision.prefill_reason
            prefill_name = prefill.name if prefill else ""
            fetch_name = decision.fetch.name if decision.fetch else ""
        path, model, key, outcome = scope["path"], get("model", ""), get("key", ""), get("outcome", "")
        if (error := get("error", "")) or self._text or self._failures:
            rest = Rest(error[:MAX_ERROR_CHARACTERS], self._text, self._failures)
        log.finished.append(
            scope["request_id"],
            (path, model, key, outcome, engine, reason, index_kind, prefill_name, prefill_reason, fetch_name),
            self._arrived_s,
            self._tokenized_s,
            now_s,
            self._sent_s,
            self._waited_s,
            self._first_byte_s,
            get("status", 0),
            self.prompt_tokens,
            self.completion_tokens,
            hit_tokens,
            host_tokens,
            disk_tokens,
            rest,
        )


def _failed_attempt(
    decision: Decision, sent_s: float, waited_s: float, first_byte_s: float | None, failed_s: float, failure: str
) -> Attempt:
    return Attempt(
        sent_s=sent_s,
        waited_s=waited_s,
        first_byte_s=first_byte_s,
        failed_s=failed_s,
        failure=failure,
        engine=decision.decode.name,
        hit_tokens=decision.hit_tokens,
        reason=decision.reason,
        index_kind=decision.index,
        prefill=decision.prefill.name if decision.prefill else "",
        prefill_reason=decision.prefill_reason,
        fetch=decision.fetch.name if decision.fetch else "",
        host_tokens=decision.host_tokens,
        disk_tokens=decision.disk_tokens,
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
        self.clock_offset_s = time.time() - time.monotonic()
        """Seconds from the gateway's clock to that of the epoch."""
        self.finished = RecordRing(MAX_REQUESTS)
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
        if tokens > 0:
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
        return self.finished.latest

    def records(self, viewer: Viewer, after: int = 0) -> Iterator[Record]:
        """Yields the requests that the viewer may see, with serials above `after`, newest first."""
        for record in self.finished.newest_first():
            if record.serial <= after:
                return
            if viewer.everything or viewer.owns(record.key):
                yield record


def completion_tokens_of(body: bytes) -> int:
    """Returns the number of output tokens in the usage at the end of a whole answer; -1 if there is none."""
    for name in _USAGE_NAMES:
        at = body.rfind(name, -USAGE_BYTES)
        if at >= 0 and (found := _NUMBER.match(body, at + len(name))):
            return int(found[1])
    return -1


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
