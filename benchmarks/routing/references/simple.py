"""What a Kubernetes Service or any HTTP load balancer does: take turns, or take the least busy."""

from itertools import count

from benchmarks.routing.references.base import View
from benchmarks.routing.workload import SimulatedRequest


class RoundRobin:
    """Each engine in turn."""

    def __init__(self) -> None:
        self._next = count()

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """See Policy."""
        numbers = view.numbers()
        return numbers[next(self._next) % len(numbers)]


class LeastLoaded:
    """The engine with the fewest requests, running or waiting; among equals the fewest queued prompt tokens."""

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """See Policy."""
        return min(view.numbers(), key=lambda n: (view.load(n), view.engines[n].queued_tokens()))
