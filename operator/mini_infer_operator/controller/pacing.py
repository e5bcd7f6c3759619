"""Whose turn it is to roll to a new default image: so many services, and so many GPUs beside theirs, at a time.

A rollout that does not get on keeps its turn, so an image that does not work stops after the first few services.
"""

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

START_PAUSE_S = 10.0
"""After the start nobody gets a turn until those who had one before have been seen."""


class RolloutThrottle(Generic[Key]):
    """Turns by key. `wake` is called with keys that wait when a turn becomes free."""

    def __init__(
        self,
        most_services: int,
        most_gpus: float,
        wake: Callable[[Key], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_services = most_services
        self._most_gpus = most_gpus
        self._wake = wake
        self._now_s = now_s
        self._started_s = now_s()
        self._rolling: dict[Key, float] = {}
        self._waiting: dict[Key, None] = {}  # in the order in which they came

    def restart(self) -> None:
        """Begin anew: nobody holds a turn, and the pause after the start begins."""
        self._started_s = self._now_s()
        self._rolling.clear()
        self._waiting.clear()

    def hold(self, key: Key, gpus: float) -> None:
        """It is rolling, whoever allowed it."""
        self._waiting.pop(key, None)
        self._rolling[key] = gpus

    def may_start(self, key: Key, gpus: float) -> bool:
        """Whether it is the turn of `key`, whose rollout needs `gpus` beside those that it has; if so, it holds it."""
        if key in self._rolling:
            return True
        paused = self._now_s() - self._started_s < START_PAUSE_S
        full = len(self._rolling) >= self._most_services
        too_many = bool(self._rolling) and sum(self._rolling.values()) + gpus > self._most_gpus
        if paused or full or too_many:
            self._waiting[key] = None
            return False
        self.hold(key, gpus)
        return True

    def look_again_s(self) -> float:
        """For who waits: how long the pause after the start still lasts; 0 if it is over."""
        return max(0.0, self._started_s + START_PAUSE_S - self._now_s())

    def release(self, key: Key) -> None:
        """It has rolled, or is gone, or need not roll any more."""
        self._waiting.pop(key, None)
        if self._rolling.pop(key, None) is not None:
            for waiting in list(self._waiting)[: self._most_services]:
                self._wake(waiting)
