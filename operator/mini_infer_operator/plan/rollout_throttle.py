"""Throttles rollouts of a new default image: at most N services and M extra GPUs at once.

A rollout that does not progress keeps its slot, so an image that does not work stops after the first few services.
"""

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

START_PAUSE_S = 10.0
"""Seconds after the start in which no rollout may begin, so that all those already running are seen first."""


class RolloutThrottle(Generic[Key]):
    """Grants rollout slots by key. `wake` is called with keys that wait when a slot becomes free."""

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
        """Frees all slots and begins the pause after the start again."""
        self._started_s = self._now_s()
        self._rolling.clear()
        self._waiting.clear()

    def occupy(self, key: Key, gpus: float) -> None:
        """Gives `key` a slot without a check of the limits: its rollout has begun already."""
        self._waiting.pop(key, None)
        self._rolling[key] = gpus

    def may_start(self, key: Key, gpus: float) -> bool:
        """Returns True if `key` has or gets a slot, else queues it. Its rollout needs `gpus` extra GPUs."""
        if key in self._rolling:
            return True
        paused = self._now_s() - self._started_s < START_PAUSE_S
        full = len(self._rolling) >= self._most_services
        too_many = bool(self._rolling) and sum(self._rolling.values()) + gpus > self._most_gpus
        if paused or full or too_many:
            self._waiting[key] = None
            return False
        self.occupy(key, gpus)
        return True

    def look_again_s(self) -> float:
        """Returns the remaining seconds of the pause after the start, for keys that wait; 0 if it is over."""
        return max(0.0, self._started_s + START_PAUSE_S - self._now_s())

    def release(self, key: Key) -> None:
        """Frees the slot of `key`, which has rolled, is gone, or need not roll any more."""
        self._waiting.pop(key, None)
        if self._rolling.pop(key, None) is not None:
            for waiting in list(self._waiting)[: self._most_services]:
                self._wake(waiting)
