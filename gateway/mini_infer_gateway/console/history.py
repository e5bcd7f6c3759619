"""Records how busy each engine is, as short series of samples for sparklines. Pure: the caller samples at intervals."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from mini_infer_gateway.console.request_log import Trace
from mini_infer_gateway.fleet.load import Load

SAMPLE_EVERY_S: Final = 2.0
MAX_SAMPLES: Final = 150
"""Samples that are kept of each engine: five minutes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of one engine at one time; rates are since the sample before."""

    running: int
    waiting: int
    queued_tokens: int
    kv_usage: float
    requests_per_s: float
    tokens_per_s: float
    hit_share: float | None
    """Share of prompt tokens that were cached; None if no prompt was sent there."""


@dataclass(slots=True)
class _Counts:
    """Counts what has happened at one engine since the last sample."""

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


@dataclass(slots=True)
class _Series:
    counts: _Counts = field(default_factory=_Counts)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))


class History:
    """The series of all engines."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        self._sampled_s: float | None = None

    def finished(self, trace: Trace) -> None:
        """Counts a request that has ended."""
        if trace.decision is None:
            return
        counts = self._counts(trace.decision.decode.name)
        counts.requests += 1
        counts.prompt_tokens += trace.prompt_tokens
        counts.hit_tokens += min(trace.decision.hit_tokens, trace.prompt_tokens)
        if trace.completion_tokens:
            counts.tokens += max(0, trace.completion_tokens - trace.counted)

    def sample(self, loads: Mapping[str, Load], in_flight: Iterable[Trace], now_s: float) -> None:
        """Adds a sample of each engine in `loads`, and forgets all other engines."""
        for trace in in_flight:
            if trace.progress and trace.decision and (tokens := trace.progress.tokens):
                counts = self._counts(trace.decision.decode.name)
                counts.tokens += max(0, tokens - trace.counted)
                trace.counted = max(tokens, trace.counted)
        took_s = SAMPLE_EVERY_S if self._sampled_s is None else max(0.001, now_s - self._sampled_s)
        self._sampled_s = now_s
        self._series = {name: self._series.get(name) or _Series() for name in loads}
        for name, load in loads.items():
            series = self._series[name]
            counts, series.counts = series.counts, _Counts()
            series.samples.append(
                Sample(
                    running=load.running,
                    waiting=load.waiting,
                    queued_tokens=load.queued_tokens,
                    kv_usage=round(load.kv_usage, 4),
                    requests_per_s=round(counts.requests / took_s, 3),
                    tokens_per_s=round(counts.tokens / took_s, 1),
                    hit_share=round(counts.hit_tokens / counts.prompt_tokens, 4) if counts.prompt_tokens else None,
                )
            )

    def _counts(self, engine: str) -> _Counts:
        series = self._series.get(engine)
        if series is None:
            series = self._series[engine] = _Series()
        return series.counts

    def latest(self, engine: str) -> Sample | None:
        """Returns the last sample of an engine; None if there is none yet."""
        series = self._series.get(engine)
        return series.samples[-1] if series and series.samples else None

    def samples(self, engine: str) -> list[Sample]:
        """Returns all samples of an engine, oldest first."""
        series = self._series.get(engine)
        return list(series.samples) if series else []
