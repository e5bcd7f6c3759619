"""Counts requests, latencies and divergences by revision while a service has a canary (`GET /rollouts`).

It observes requests, and changes nothing. Without a canary it costs a request one look at an empty table.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mini_infer_contract.rollouts import (
    DIVERGENCE_BUCKETS,
    FIRST_TOKEN_UNIT_TOKENS,
    GatewayRollouts,
    RevisionFigures,
    divergence_bucket_of,
)
from mini_infer_contract.scaling import LATENCY_BUCKETS_S, bucket_of
from mini_infer_gateway.console.request_log import completion_tokens_of
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.metrics import Outcome
from mini_infer_gateway.pipeline.observer import NOBODY, RequestTrace, StreamProgress
from mini_infer_gateway.pipeline.retries import Failure
from mini_infer_gateway.routing.base import Decision
from mini_infer_web.asgi import Scope

STREAM_CUT: Final = "stream_cut"
"""The reason of a stream that lost its engine and goes on at another."""
_ENGINE_FAULTS: Final = frozenset(
    failure.value
    for failure in (
        *(Failure.CONNECT, Failure.BROKE, Failure.MALFORMED, Failure.TIMEOUT),
        *(Failure.STATUS, Failure.DIED, Failure.HUNG),
    )
) | {STREAM_CUT}
"""Failed attempts that are the engine's fault. One that drains, is full or was removed works as it should."""
_ERRORS: Final = frozenset((Outcome.SERVER_ERROR.value, Outcome.BROKE.value, Outcome.IN_BAND_ERROR.value))
TOO_MANY_REQUESTS: Final = 429


WARM_UP: Final = 5
"""Streams and answers of each revision whose latencies are not counted: the first ones of an engine are slow."""


def _no_latencies() -> list[int]:
    return [0] * (len(LATENCY_BUCKETS_S) + 1)


@dataclass(slots=True)
class RevisionCounts:
    """The counters of one revision of one service."""

    requests: int = 0
    errors: int = 0
    rejected: int = 0
    copies: int = 0
    replays: int = 0
    unscored: int = 0
    divergence_sum: float = 0.0
    ttft: list[int] = field(default_factory=_no_latencies)
    itl: list[int] = field(default_factory=_no_latencies)
    whole: list[int] = field(default_factory=_no_latencies)
    divergence: list[int] = field(default_factory=lambda: [0] * (len(DIVERGENCE_BUCKETS) + 1))
    timed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("ttft", "itl", "whole"), 0))
    """Latencies of each kind so far, those of the warm-up included."""

    def first_token(self, seconds: float, uncached_tokens: int) -> None:
        """Counts the time to the first token of a stream, for each unit of uncached prompt tokens begun."""
        units = 1 + max(0, uncached_tokens - 1) // FIRST_TOKEN_UNIT_TOKENS
        self._count("ttft", seconds / units)

    def between_tokens(self, seconds: float) -> None:
        """Counts the mean time between two tokens of a stream."""
        self._count("itl", seconds)

    def whole_answer(self, seconds: float) -> None:
        """Counts the time for each token of an answer that is no stream."""
        self._count("whole", seconds)

    def _count(self, kind: str, seconds: float) -> None:
        self.timed[kind] += 1
        if self.timed[kind] > WARM_UP:
            counts: list[int] = getattr(self, kind)
            counts[bucket_of(seconds)] += 1

    def diverged(self, nats: float) -> None:
        """Counts an answer that was scored."""
        self.replays += 1
        self.divergence_sum += nats
        self.divergence[divergence_bucket_of(nats)] += 1

    def report(self, memory_bytes: dict[str, int]) -> RevisionFigures:
        """Returns the counters as they are reported."""
        return RevisionFigures(
            requests=self.requests,
            errors=self.errors,
            rejected=self.rejected,
            copies=self.copies,
            ttft_counts=_unless_empty(self.ttft),
            itl_counts=_unless_empty(self.itl),
            whole_counts=_unless_empty(self.whole),
            replays=self.replays,
            unscored=self.unscored,
            divergence_sum=round(self.divergence_sum, 6),
            divergence_counts=_unless_empty(self.divergence),
            memory_bytes=memory_bytes,
        )


class CanaryFigures:
    """The counters of all services that have a canary. It is an observer of requests."""

    def __init__(self, fleet: Fleet, ledger: LoadLedger) -> None:
        self._fleet, self._ledger, self._started_s = fleet, ledger, time.time()
        self._counts: dict[str, dict[str, RevisionCounts]] = {}

    def begin(self, scope: Scope, now_s: float) -> RequestTrace:
        """Returns the trace of a request that has just arrived."""
        return _Trace(self) if self._fleet.canaries else NOBODY

    def counts(self, service: str, revision: str) -> RevisionCounts | None:
        """Returns the counters of a revision; None if its service has no canary."""
        if service not in self._fleet.canaries:
            return None
        return self._counts.setdefault(service, {}).setdefault(revision, RevisionCounts())

    def report(self) -> GatewayRollouts:
        """Returns the answer to `GET /rollouts`."""
        for service in self._counts.keys() - self._fleet.canaries.keys():
            del self._counts[service]
        memory: dict[tuple[str, str], dict[str, int]] = {}
        for name, state in self._fleet.endpoints.items():
            if state.endpoint.service in self._fleet.canaries and (known := self._ledger.memory_bytes(name)):
                memory.setdefault((state.endpoint.service, state.endpoint.revision), {})[name] = known
        services: dict[str, dict[str, RevisionFigures]] = {service: {} for service in self._fleet.canaries}
        for service, revisions in services.items():
            counted = self._counts.get(service, {})
            for revision in counted.keys() | {known for owner, known in memory if owner == service}:
                counts = counted.get(revision) or RevisionCounts()
                revisions[revision] = counts.report(memory.get((service, revision), {}))
        return GatewayRollouts(self._started_s, services)


class _Trace:
    """Counts one request for the revision of each engine that it was sent to."""

    __slots__ = ("_counts", "_figures", "_first_s", "_is_stream", "_output", "_progress", "_prompt", "_sent_s", "_was")

    def __init__(self, figures: CanaryFigures) -> None:
        self._figures = figures
        self._counts: RevisionCounts | None = None
        self._progress: StreamProgress | None = None
        self._prompt, self._output, self._is_stream = 0, -1, False
        self._sent_s = self._first_s = 0.0
        self._was: Decision | None = None

    def tokenized(self, fields: Mapping[str, Any], prompt_tokens: int, now_s: float) -> None:
        """Learns the length of the prompt."""
        self._prompt, self._is_stream = prompt_tokens, fields.get("stream") is True

    def sent(self, decision: Decision, waited_s: float, now_s: float) -> None:
        """Begins an attempt."""
        self._counts = self._figures.counts(decision.decode.service, decision.decode.revision)
        self._is_stream = self._is_stream and not self._first_s  # the rest of a stream has no first token
        self._was, self._sent_s = decision, now_s

    def answered(self, now_s: float) -> None:
        """Takes the time to the first token."""
        self._first_s = now_s
        if self._counts is not None and self._is_stream and self._was is not None:
            self._counts.first_token(now_s - self._sent_s, self._prompt - self._was.hit_tokens)

    def answered_whole(self, body: bytes) -> None:
        """Reads the length of an answer that is no stream."""
        self._output = completion_tokens_of(body)

    def streams(self, progress: StreamProgress) -> None:
        """Takes a stream whose length is known as it grows."""
        self._progress = progress

    def failed(self, reason: str, now_s: float) -> None:
        """Counts an attempt that was the engine's fault."""
        counts, self._counts = self._counts, None
        if counts is not None and reason in _ENGINE_FAULTS:
            counts.requests += 1
            counts.errors += 1

    def ended(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Counts the latest attempt, with the time between the tokens of its answer."""
        counts, progress, self._counts, self._progress = self._counts, self._progress, None, None
        outcome, status = facts.get("outcome"), facts.get("status")
        if counts is None or status == TOO_MANY_REQUESTS:
            return
        if outcome in _ERRORS:
            counts.requests += 1
            counts.errors += 1
        elif outcome == Outcome.CLIENT_ERROR.value:
            counts.requests += 1
            counts.rejected += 1
        elif outcome == Outcome.OK.value:
            counts.requests += 1
            output = progress.tokens if progress else self._output
            if self._is_stream and output > 1:
                counts.between_tokens((now_s - self._first_s) / (output - 1))
            elif not self._is_stream and progress is None and output > 0:
                counts.whole_answer((now_s - self._sent_s) / output)


def _unless_empty(counts: list[int]) -> list[int]:
    return list(counts) if any(counts) else []
