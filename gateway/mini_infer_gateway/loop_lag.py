"""Measures stalls of the event loop with a timer that records its own delay. Every request waits at least as long."""

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mini_infer_contract import metrics as names

INTERVAL_S = 0.01
"""Seconds between two checks: every longer stall is seen, apart from at most this much of it."""
STALL_S = 0.02
WINDOW_S = 30.0
"""Seconds of a window; the longest lag is kept for one to two windows."""


class LoopLag:
    """Measures the lag of the event loop as a task; Prometheus reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window_ends_s = 0.0
        self._longest_s = [0.0, 0.0]
        """The longest lag of the previous and of the current window."""
        self.stalls = 0

    async def run(self) -> None:
        """Measures until cancelled."""
        while True:
            due_s = self._clock() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            now_s = self._clock()
            self.observe(now_s - due_s, now_s)

    def observe(self, lag_s: float, now_s: float) -> None:
        """Records the lag of one timer."""
        if now_s >= self._window_ends_s:
            self._window_ends_s = now_s + WINDOW_S
            self._longest_s = [self._longest_s[1], 0.0]
        self._longest_s[1] = max(self._longest_s[1], lag_s)
        self.stalls += lag_s > STALL_S

    @property
    def longest_s(self) -> float:
        """The longest lag of the last minute, in seconds."""
        return max(self._longest_s)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics for prometheus_client."""
        lag = GaugeMetricFamily(names.GATEWAY_EVENT_LOOP_LAG, "Longest stall of the event loop in the last minute.")
        lag.add_metric([], self.longest_s)
        stalls = CounterMetricFamily(names.GATEWAY_EVENT_LOOP_STALLS, "Stalls of the event loop over 20 ms.")
        stalls.add_metric([], self.stalls)
        return iter([lag, stalls])
