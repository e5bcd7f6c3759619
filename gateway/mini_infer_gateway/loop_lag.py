"""How long the event loop stands still: a timer that looks at how late it is. All requests wait that long at least."""

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mini_infer_contract import metrics as names

INTERVAL_S = 0.01
"""Between two looks: a stall that is longer is always seen, all but this much of it."""
STALL_S = 0.02
WINDOW_S = 30.0
"""The longest lag is kept for one to two of these."""


class LoopLag:
    """Runs as a task; Prometheus reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window_ends_s = 0.0
        self._longest_s = [0.0, 0.0]
        """Of the window before and of this one."""
        self.stalls = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due_s = self._clock() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            now_s = self._clock()
            self.observe(now_s - due_s, now_s)

    def observe(self, lag_s: float, now_s: float) -> None:
        """The timer was this late."""
        if now_s >= self._window_ends_s:
            self._window_ends_s = now_s + WINDOW_S
            self._longest_s = [self._longest_s[1], 0.0]
        self._longest_s[1] = max(self._longest_s[1], lag_s)
        self.stalls += lag_s > STALL_S

    @property
    def longest_s(self) -> float:
        """The longest lag of the last minute."""
        return max(self._longest_s)

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        lag = GaugeMetricFamily(names.GATEWAY_EVENT_LOOP_LAG, "Longest stall of the event loop in the last minute.")
        lag.add_metric([], self.longest_s)
        stalls = CounterMetricFamily(names.GATEWAY_EVENT_LOOP_STALLS, "Stalls of the event loop over 20 ms.")
        stalls.add_metric([], self.stalls)
        return iter([lag, stalls])
