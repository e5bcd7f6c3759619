"""Keeps the latest requests with the times of their steps. A request costs a few microseconds; views are made later."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, Final

from mini_infer_gateway.console.viewer import Viewer
from mini_infer_gateway.pipeline.observer import Progress
from mini_infer_gateway.routing.base import Decision
from mini_infer_web.asgi import Scope

MAX_REQUESTS: Final = 1000
"""Finished requests that are kept; older ones are forgotten."""
MAX_STEPS: Final = 32
"""Steps that are kept of one request: one that is tried often has no more."""
MAX_ERROR_CHARACTERS: Final = 300
"""Characters that are kept of an error."""
MAX_TEXT_CHARACTERS: Final = 1000
"""Characters that are kept of a prompt, if texts are kept at all."""

Step = tuple[float, str, Any]
"""The time of a step, its name, and what belongs to it."""


class Trace:
    """The steps of one request: a `RequestTrace`."""

    __slots__ = (
        "_log",
        "arrived_s",
        "counted",
        "decision",
        "ended_s",
        "facts",
        "path",
        "progress",
        "prompt_tokens",
        "request_id",
        "serial",
        "steps",
        "text",
        "tokens",
    )

    def __init__(self, log: "RequestLog", scope: Scope, now_s: float) -> None:
        self._log = log
        self.request_id: str = scope.get("request_id", "")
        self.path: str = scope["path"]
        self.arrived_s = now_s
        self.ended_s = inf
        self.prompt_tokens = 0
        self.steps: list[Step] = []
        self.decision: Decision | None = None
        self.progress: Progress | None = None
        self.facts: dict[str, Any] = _NO_FACTS
        self.tokens: int | None = None
        """Number of output tokens, once the request has ended; None if the gateway does not know it."""
        self.counted = 0
        """Number of output tokens that the history has counted already."""
        self.serial = 0
        self.text = ""

    def tokenized(self, fields: Mapping[str, Any], prompt_tokens: int, now_s: float) -> None:
        """Records that the request is read."""
        self.prompt_tokens = prompt_tokens
        self.steps.append((now_s, "tokenized", None))
        if self._log.keeps_texts:
            self.text = text_of(fields)

    def sent(self, decision: Decision, progress: Progress, waited_s: float, now_s: float) -> None:
        """Records an attempt."""
        self.decision, self.progress = decision, progress
        if len(self.steps) < MAX_STEPS:
            self.steps.append((now_s, "sent", (decision, waited_s)))

    def answered(self, now_s: float) -> None:
        """Records the first byte of the answer to the latest attempt."""
        if len(self.steps) < MAX_STEPS:
            self.steps.append((now_s, "first_byte", None))

    def failed(self, reason: str, now_s: float) -> None:
        """Records that the latest attempt failed."""
        if len(self.steps) < MAX_STEPS:
            self.steps.append((now_s, "failed", reason))

    def ended(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Records the end of the request."""
        self.ended_s, self.facts = now_s, {**facts}  # the access log takes some of them away
        if "error" in facts:
            self.facts["error"] = str(facts["error"])[:MAX_ERROR_CHARACTERS]
        if self.progress:
            self.tokens, self.progress = self.progress.completion_tokens, None
        self._log.finished(self)

    @property
    def owner(self) -> str:
        """The name of the key that sent the request; "" if there is none."""
        key: str = self.facts.get("key", "")
        return key


_NO_FACTS: Final[dict[str, Any]] = {}


class RequestLog:
    """The requests in flight and the latest finished ones of one gateway: a `RequestObserver`."""

    def __init__(self, *, keeps_texts: bool = False, on_finish: Callable[[Trace], None] | None = None) -> None:
        """`on_finish` is called with each request that has ended."""
        self.keeps_texts = keeps_texts
        self.on_finish = on_finish
        self.in_flight: set[Trace] = set()
        self._finished: deque[Trace] = deque(maxlen=MAX_REQUESTS)
        self._serials = count(1)
        self._clock_offset_s = time.time() - time.monotonic()

    def begin(self, scope: Scope, now_s: float) -> Trace:
        """Returns the trace of a request that has just arrived."""
        trace = Trace(self, scope, now_s)
        self.in_flight.add(trace)
        return trace

    def finished(self, trace: Trace) -> None:
        """Moves a request to the finished ones."""
        self.in_flight.discard(trace)
        trace.serial = next(self._serials)
        if self.on_finish:
            self.on_finish(trace)
        self._finished.append(trace)

    @property
    def latest(self) -> int:
        """The serial number of the request that ended last; 0 if none has."""
        return self._finished[-1].serial if self._finished else 0

    def rows(self, viewer: Viewer, after: int = 0, most: int = MAX_REQUESTS) -> list["RequestRow"]:
        """Returns at most `most` requests that the viewer may see, with serials above `after`, newest first."""
        rows: list[RequestRow] = []
        for trace in self._visible(viewer):
            if trace.serial <= after or len(rows) >= most:
                break
            rows.append(request_row(trace, self._clock_offset_s, viewer))
        return rows

    def find(self, viewer: Viewer, request_id: str) -> "RequestDetail | None":
        """Returns the latest request with this id that the viewer may see, finished or in flight."""
        for trace in self._visible(viewer):
            if trace.request_id == request_id:
                return request_detail(trace, self._clock_offset_s, viewer)
        return None

    def _visible(self, viewer: Viewer) -> Iterator[Trace]:
        return (trace for trace in reversed(self._finished) if viewer.everything or viewer.owns(trace.owner))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One finished request, for a list. Fields about engines are empty for viewers who may not see engines."""

    serial: int
    id: str
    time: float
    """Seconds since the epoch at its arrival."""
    path: str
    model: str
    key: str
    status: int
    outcome: str
    error: str
    duration_s: float
    queue_s: float
    first_byte_s: float | None
    """Seconds from its arrival to the first byte of its answer; None if there was none."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int | None
    attempts: int
    engine: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStep:
    """One step of a request."""

    at_s: float
    """Seconds since its arrival."""
    step: str
    """arrived, tokenized, queued, sent, first_byte, failed, or ended."""
    engine: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDetail:
    """One request with its timeline."""

    request: RequestRow
    timeline: list[TimelineStep]
    text: str


def request_row(trace: Trace, clock_offset_s: float, viewer: Viewer) -> RequestRow:
    """Returns a finished request as a row of the list."""
    facts, decision, everything = trace.facts, trace.decision, viewer.everything
    sent = [value for _, step, value in trace.steps if step == "sent"]
    first_byte_s = next((at_s for at_s, step, _ in trace.steps if step == "first_byte"), None)
    return RequestRow(
        serial=trace.serial,
        id=trace.request_id,
        time=round(trace.arrived_s + clock_offset_s, 3),
        path=trace.path,
        model=facts.get("model", ""),
        key=trace.owner,
        status=facts.get("status", 0),
        outcome=facts.get("outcome", ""),
        error=str(facts.get("error", "")) if everything else "",
        duration_s=round(trace.ended_s - trace.arrived_s, 6),
        queue_s=round(sum(waited_s for _, waited_s in sent), 6),
        first_byte_s=None if first_byte_s is None else round(first_byte_s - trace.arrived_s, 6),
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=decision.hit_tokens if decision else 0,
        completion_tokens=trace.tokens,
        attempts=len(sent),
        engine=decision.decode.name if decision and everything else "",
        reason=decision.reason if decision and everything else "",
    )


def request_detail(trace: Trace, clock_offset_s: float, viewer: Viewer) -> RequestDetail:
    """Returns a finished request with its timeline."""
    return RequestDetail(
        request=request_row(trace, clock_offset_s, viewer),
        timeline=list(_timeline(trace, viewer.everything)),
        text=trace.text,
    )


def _timeline(trace: Trace, everything: bool) -> Iterator[TimelineStep]:
    yield TimelineStep(at_s=0.0, step="arrived")
    for at_s, step, value in trace.steps:
        after_s = round(at_s - trace.arrived_s, 6)
        if step != "sent":
            yield TimelineStep(at_s=after_s, step=step, detail=str(value or "") if everything else "")
            continue
        decision, waited_s = value
        if waited_s:
            yield TimelineStep(at_s=round(after_s - waited_s, 6), step="queued")
        if not everything:
            yield TimelineStep(at_s=after_s, step="sent")
            continue
        yield TimelineStep(at_s=after_s, step="sent", engine=decision.decode.name, detail=_why(decision))
    yield TimelineStep(
        at_s=round(trace.ended_s - trace.arrived_s, 6), step="ended", detail=trace.facts.get("outcome", "")
    )


def _why(decision: Decision) -> str:
    parts = [f"chosen by {decision.reason}", f"{decision.hit_tokens} tokens cached ({decision.index})"]
    if decision.prefill:
        parts.append(f"prompt computed by {decision.prefill.name} ({decision.prefill_reason})")
    if decision.fetch:
        parts.append(f"KV cache fetched from {decision.fetch.name}")
    return ", ".join(parts)


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
