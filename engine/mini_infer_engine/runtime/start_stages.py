"""Measures the stages of an engine's start, one after the other."""

import time
from collections.abc import Callable


class StartStages:
    """Seconds of each stage that has ended, by its name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins the first stage."""
        self._clock, self._begin_s = clock, clock()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Ends the current stage under this name, and begins the next one."""
        now_s = self._clock()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now_s - self._begin_s, 4)
        self._begin_s = now_s
