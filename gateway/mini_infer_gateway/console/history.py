"""Records how busy each engine is, as short series of samples for sparklines. Pure: the caller samples at intervals."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mini_infer_gateway.console.request_log import EngineCounts
from mini_infer_gateway.fleet.load import Load

SAMPLE_EVERY_S: Final = 2.0
MAX_SAMPLES: Final = 150
"""Samples that are kept of each engine: five minutes."""
NOTHING: Final = EngineCounts()


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


class History:
    """The series of all engines."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[Sample]] = {}
        self._sampled_s: float | None = None

    def sample(self, loads: Mapping[str, Load], counts: Mapping[str, EngineCounts], now_s: float) -> None:
        """Adds a sample of each engine in `loads`, and forgets all other engines. `counts` are since the last one."""
        took_s = SAMPLE_EVERY_S if self._sampled_s is None else max(0.001, now_s - self._sampled_s)
        self._sampled_s = now_s
        self._samples = {name: self._samples.get(name) or deque(maxlen=MAX_SAMPLES) for name in loads}
        for name, load in loads.items():
            ended = counts.get(name, NOTHING)
            prompt_tokens = ended.prompt_tokens
            self._samples[name].append(
                Sample(
                    running=load.running,
                    waiting=load.waiting,
                    queued_tokens=load.queued_tokens,
                    kv_usage=round(load.kv_usage, 4),
                    requests_per_s=round(ended.requests / took_s, 3),
                    tokens_per_s=round(ended.completion_tokens / took_s, 1),
                    hit_share=round(min(1.0, ended.hit_tokens / prompt_tokens), 4) if prompt_tokens else None,
                )
            )

    def latest(self, engine: str) -> Sample | None:
        """Returns the last sample of an engine; None if there is none yet."""
        samples = self._samples.get(engine)
        return samples[-1] if samples else None

    def samples(self, engine: str) -> list[Sample]:
        """Returns all samples of an engine, oldest first."""
        return list(self._samples.get(engine, ()))
