"""Bounds the memory of long pages that are fetched from engines, over all endpoints: any pod may send any length."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mini_infer_web.fair_budget import FairBudget


class FetchMemory:
    """The memory for pages of one kind that are being read. A service gets its share of it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._budget = FairBudget(limit_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of pages that are being read."""
        return self._budget.used

    @contextmanager
    def reading(self, service: str) -> Iterator[Callable[[int], bool]]:
        """Returns a function that reserves memory for so many more bytes, and returns False if there is none."""
        taken = 0

        def reserve(more: int) -> bool:
            nonlocal taken
            if not self._budget.take(more, service):
                return False
            taken += more
            return True

        try:
            yield reserve
        finally:
            self._budget.give_back(taken, service)
