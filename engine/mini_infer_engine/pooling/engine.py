"""Batches requests for embeddings and scores over a model that computes each input in one pass. No torch, no text.

It stands in for `core.engine.Engine` where nothing is generated: no pages, no prefix cache, no slots. A request waits,
is computed, and is over.
"""

import dataclasses
import logging
import time
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from mini_infer_contract.events import BlockStored, KVEvent, LoadReport
from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.pooling.batches import choose_batch

MAX_FAILED_PASSES = 10
"""Consecutive failed passes after which the device counts as broken."""
_WINDOW = 4
"""Waiting inputs among which a pass chooses, as a multiple of its most inputs."""

logger = logging.getLogger(__name__)


class PoolingRunner(Protocol):
    """Computes inputs whole."""

    def compute(self, requests: Sequence[Request]) -> list[bytes]:
        """Returns the embedding or the scores of each request, as packed fp32."""


class PoolingFailedError(RuntimeError):
    """Raised when passes keep failing: only a new process, perhaps another device, can help."""


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    arrival: int
    request: Request = dataclasses.field(compare=False)
    arrival_s: float = dataclasses.field(compare=False)


class PoolingEngine:
    """All waiting requests of one model. Not thread-safe: one owner calls everything."""

    only_receives = False
    """Nothing waits for other engines."""

    def __init__(
        self,
        runner: PoolingRunner,
        max_model_len: int,
        token_budget: int,
        max_inputs: int,
        *,
        record_events: bool = True,
    ) -> None:
        self._runner = runner
        self.max_model_len = max_model_len
        self._token_budget, self._max_inputs = token_budget, max_inputs
        self._waiting: list[_Waiting] = []
        self._ids: set[str] = set()
        self._arrivals = 0
        self._record_events = record_events
        self._accepted: list[str] = []
        self._stats = EngineStats()
        self._failed_passes = 0

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError if its id is in use, it is too long, or it is for text."""
        name, count = request.request_id, len(request.prompt_token_ids)
        if name in self._ids:
            raise ValueError(f"request id {name!r} is in use: choose another")
        if not request.embeds:
            raise ValueError(f"request {name!r} is for text, and this model generates none")
        if not 1 <= count <= self.max_model_len:
            raise ValueError(f"request {name!r} has {count} tokens: there must be from 1 to {self.max_model_len}")
        insort(self._waiting, _Waiting(request.priority, self._arrivals, request, time.monotonic()))
        self._ids.add(name)
        self._arrivals += 1
        if self._record_events:
            self._accepted.append(name)

    def abort(self, request_id: str) -> None:
        """Drops a request that waits. An unknown id is no error: its request has ended already."""
        if request_id in self._ids:
            self._ids.remove(request_id)
            self._waiting = [one for one in self._waiting if one.request.request_id != request_id]

    next_due_s = inf
    """Nothing is due: no blocks are cached."""

    def hint(self, request: Request) -> None:
        """Does nothing: no blocks are cached."""

    def prefetch(self, request_ids: Iterable[str], ttl_s: float) -> None:
        """Does nothing: no blocks are cached."""

    def write_behind(self) -> bool:
        """Returns False: there is no cache whose blocks could be copied to lower tiers."""
        return False

    @property
    def has_work(self) -> bool:
        """True if `step` has something to do."""
        return bool(self._waiting)

    def step(self) -> list[Output]:
        """Computes one pass, and returns the outputs of its requests, which are over."""
        if not self._waiting:
            return []
        chosen = self._take()
        now_s = time.monotonic()
        self._count(chosen, now_s)
        try:
            results = self._runner.compute([one.request for one in chosen])
        except Exception as error:
            return self._fail(chosen, error)
        self._failed_passes = 0
        self._measure(chosen, time.monotonic() - now_s)
        return [
            Output(
                request_id=one.request.request_id,
                token_ids=[],
                finish_reason="stop",
                queue_time_s=now_s - one.arrival_s,
                embedding=result,
            )
            for one, result in zip(chosen, results, strict=True)
        ]

    def _take(self) -> list[_Waiting]:
        window = self._waiting[: _WINDOW * self._max_inputs]
        lengths = [len(one.request.prompt_token_ids) for one in window]
        indices = set(choose_batch(lengths, self._token_budget, self._max_inputs))
        chosen = [window[index] for index in sorted(indices)]
        rest = [one for index, one in enumerate(window) if index not in indices]
        self._waiting[: len(window)] = rest
        self._ids.difference_update(one.request.request_id for one in chosen)
        return chosen

    def _count(self, chosen: Sequence[_Waiting], now_s: float) -> None:
        stats, tokens = self._stats, sum(len(one.request.prompt_token_ids) for one in chosen)
        stats.steps += 1
        stats.admissions += len(chosen)
        stats.queue_time_s += sum(now_s - one.arrival_s for one in chosen)
        stats.prompt_tokens += tokens
        stats.prefill_tokens += tokens
        stats.last_step_prefill_tokens = tokens

    def _measure(self, chosen: Sequence[_Waiting], seconds: float) -> None:
        """Updates the recent rate, in which the last pass counts as much as all before it."""
        rate = sum(len(one.request.prompt_token_ids) for one in chosen) / max(seconds, 1e-9)
        before = self._stats.prefill_tokens_per_s
        self._stats.prefill_tokens_per_s = (before + rate) / 2 if before else rate

    def _fail(self, chosen: Sequence[_Waiting], error: Exception) -> list[Output]:
        """Ends the requests of a failed pass. Raises PoolingFailedError if too many passes have failed in a row."""
        self._stats.failed_passes += 1
        self._failed_passes += 1
        logger.error("a pass of %d inputs failed", len(chosen), exc_info=error)
        if self._failed_passes >= MAX_FAILED_PASSES:
            raise PoolingFailedError(f"{self._failed_passes} passes in a row failed: {error}") from error
        reason = f"the pass of this request failed ({type(error).__name__}); the engine's log says why: try again"
        return [
            Output(request_id=one.request.request_id, token_ids=[], finish_reason="error", error=reason)
            for one in chosen
        ]

    def take_events(self) -> list[KVEvent]:
        """Returns no changes: there is no prefix cache."""
        return []

    def snapshot(self) -> list[BlockStored]:
        """Returns no blocks: there is no prefix cache."""
        return []

    def reset_prefix_cache(self) -> bool:
        """Returns True: nothing is cached."""
        return True

    def load(self) -> LoadReport:
        """Returns the current load, for gateways. Its `accepted` has the ids of requests added since the last call."""
        accepted, self._accepted = self._accepted, []
        return LoadReport(
            ts=time.time(),
            running=0,
            waiting=len(self._waiting),
            queued_tokens=sum(len(one.request.prompt_token_ids) for one in self._waiting),
            kv_usage=0.0,
            accepted=accepted,
            prefill_tokens_per_s=self._stats.prefill_tokens_per_s,
        )

    def stats(self) -> EngineStats:
        """Returns counters since the start, and current gauges."""
        return dataclasses.replace(self._stats, waiting=len(self._waiting))
