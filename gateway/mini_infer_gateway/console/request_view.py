"""Formats recorded requests for the console: rows of the list, and the timeline of one. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from mini_infer_gateway.console.record_ring import Attempt, Record


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


def request_row(record: Record, clock_offset_s: float, *, everything: bool) -> RequestRow:
    """Returns a finished request as a row of the list. `everything` is False for viewers who may not see engines."""
    attempts = record.attempts
    last = attempts[-1] if attempts else None
    first_byte_s = next((one.first_byte_s for one in attempts if one.first_byte_s is not None), None)
    return RequestRow(
        serial=record.serial,
        id=record.request_id,
        time=round(record.arrived_s + clock_offset_s, 3),
        path=record.path,
        model=record.model,
        key=record.key,
        status=record.status,
        outcome=record.outcome,
        error=record.error if everything else "",
        duration_s=round(record.ended_s - record.arrived_s, 6),
        queue_s=round(sum(one.waited_s for one in attempts), 6),
        first_byte_s=None if first_byte_s is None else round(first_byte_s - record.arrived_s, 6),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=last.hit_tokens if last else 0,
        completion_tokens=record.completion_tokens,
        attempts=len(attempts),
        engine=last.engine if last and everything else "",
        reason=last.reason if last and everything else "",
    )


def request_detail(record: Record, clock_offset_s: float, *, everything: bool) -> RequestDetail:
    """Returns a finished request with its timeline."""
    steps = (
        TimelineStep(
            at_s=round(step.at_s - record.arrived_s, 6),
            step=step.step,
            engine=step.engine if everything else "",
            detail=step.detail if everything or step.step == "ended" else "",
        )
        for step in _steps(record)
    )
    row = request_row(record, clock_offset_s, everything=everything)
    return RequestDetail(request=row, timeline=list(steps), text=record.text)


def _steps(record: Record) -> Iterator[TimelineStep]:
    """Yields the steps of a request on the gateway's clock."""
    yield TimelineStep(at_s=record.arrived_s, step="arrived")
    if record.tokenized_s is not None:
        yield TimelineStep(at_s=record.tokenized_s, step="tokenized")
    for attempt in record.attempts:
        if attempt.waited_s:
            yield TimelineStep(at_s=attempt.sent_s - attempt.waited_s, step="queued")
        yield TimelineStep(at_s=attempt.sent_s, step="sent", engine=attempt.engine, detail=_why(attempt))
        if attempt.first_byte_s is not None:
            yield TimelineStep(at_s=attempt.first_byte_s, step="first_byte")
        if attempt.failed_s is not None:
            yield TimelineStep(at_s=attempt.failed_s, step="failed", detail=attempt.failure)
    yield TimelineStep(at_s=record.ended_s, step="ended", detail=record.outcome)


def _why(attempt: Attempt) -> str:
    parts = [f"chosen by {attempt.reason}", f"{attempt.hit_tokens} tokens cached ({attempt.index_kind})"]
    if attempt.host_tokens:
        parts.append(f"{attempt.host_tokens} of them in main memory")
    if attempt.disk_tokens:
        parts.append(f"{attempt.disk_tokens} of them on the disk")
    if attempt.prefill:
        parts.append(f"prompt computed by {attempt.prefill} ({attempt.prefill_reason})")
    if attempt.fetch:
        parts.append(f"KV cache fetched from {attempt.fetch}")
    return ", ".join(parts)
