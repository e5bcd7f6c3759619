"""Holds requests of services that have no engine and start one on demand, until an engine is ready.

Their number is a signal: `GET /scaling` reports it, and what scales the service starts an engine. Streams get comments
meanwhile, as all that wait do. Too many requests, or ones that have waited too long, get a 429 with the expected wait.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from mini_infer_gateway.flow_control.wait_prediction import retry_after_s
from mini_infer_gateway.metrics import Metrics
from mini_infer_gateway.routing.base import Candidate
from mini_infer_web.api_errors import ApiError

LOOK_EVERY_S = 0.05
MAX_HELD = 1024
"""Held requests of one model, if --max-queue is 0, which is about engines that exist."""
USUAL_START_S = 30.0
"""Seconds that a start is expected to take until one was seen."""


class Endpoints(Protocol):
    """The endpoints and names that the gateway knows; the fleet implements it."""

    def candidates(self, names: Sequence[str], now_s: float) -> list[Candidate]:
        """Returns these endpoints as candidates."""

    def starts_on_demand(self, model: str) -> bool:
        """Returns True if an engine of this model is started when a request waits for one."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """The requests of one model that wait for its first engine."""

    names: Callable[[], Sequence[str]]
    began_s: float
    futures: "set[asyncio.Future[None]]" = field(default_factory=set)


class HeldRequests:
    """All held requests of one gateway. `run` must run as long as requests are held."""

    def __init__(
        self, endpoints: Endpoints, metrics: Metrics, most: int, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """`most` is the largest number of a model's held requests, `timeout_s` the longest that one is held."""
        self._endpoints, self._metrics, self._clock = endpoints, metrics, clock
        self._most, self._timeout_s = most, timeout_s
        self._waiting: dict[str, _Waiting] = {}
        self._starts_s: dict[str, float] = {}
        """Seconds from the first held request to a ready engine, by model, when that last happened."""
        self._some = asyncio.Event()

    def must_hold(self, model: str, names: Sequence[str]) -> bool:
        """True if the model has no ready engine, and one is started on demand."""
        return self._endpoints.starts_on_demand(model) and not self._is_ready(names)

    def counts(self) -> dict[str, int]:
        """Returns the number of held requests by model."""
        return {model: len(waiting.futures) for model, waiting in self._waiting.items()}

    async def hold(
        self,
        model: str,
        names: Callable[[], Sequence[str]],
        leave: Callable[[Callable[[Exception], None]], None],
        limit_s: float = inf,
    ) -> None:
        """Waits until an engine of the model is ready. `limit_s` is the longest that the client waits.

        `leave` is called with a function that ends the wait with an error. Raises ApiError 429 if as many requests are
        held as may be, or this one was held too long.
        """
        now_s = self._clock()
        waiting = self._waiting.setdefault(model, _Waiting(names, now_s))
        if len(waiting.futures) >= self._most:
            self._metrics.queue_refused(model, "full")
            raise self._starting(model, waiting, now_s)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        waiting.futures.add(future)
        self._some.set()

        def fail(error: Exception) -> None:
            if not future.done():
                future.set_exception(error)

        leave(fail)
        timer = loop.call_later(min(limit_s, self._timeout_s), lambda: fail(self._late(model, waiting)))
        try:
            await future
        finally:
            timer.cancel()
            waiting.futures.discard(future)
            if not waiting.futures and self._waiting.get(model) is waiting:
                del self._waiting[model]

    async def run(self) -> None:
        """Releases held requests when an engine of their model is ready, until cancelled."""
        while True:
            if not self._waiting:
                self._some.clear()
                await self._some.wait()
            await asyncio.sleep(LOOK_EVERY_S)
            self.look_once()

    def look_once(self) -> None:
        """Releases the requests whose model has a ready engine, or is no longer started on demand."""
        now_s = self._clock()
        for model, waiting in list(self._waiting.items()):
            is_ready = self._is_ready(waiting.names())
            if is_ready or not self._endpoints.starts_on_demand(model):
                if is_ready:
                    self._starts_s[model] = now_s - waiting.began_s
                del self._waiting[model]
                for future in waiting.futures:
                    if not future.done():
                        future.set_result(None)

    def _is_ready(self, names: Sequence[str]) -> bool:
        candidates = self._endpoints.candidates(names, self._clock())
        return any(one.ready and not one.circuit_open for one in candidates)

    def _late(self, model: str, waiting: _Waiting) -> ApiError:
        self._metrics.queue_refused(model, "late")
        return self._starting(model, waiting, self._clock())

    def _starting(self, model: str, waiting: _Waiting, now_s: float) -> ApiError:
        """Returns the 429 of a model whose first engine is still starting."""
        left_s = max(1.0, self._starts_s.get(model, USUAL_START_S) - (now_s - waiting.began_s))
        seconds = retry_after_s(left_s)
        message = f"an engine of model {model!r} is starting; try again in about {seconds} s"
        return ApiError(429, message, code="engine_starting", headers={"retry-after": str(seconds)})
