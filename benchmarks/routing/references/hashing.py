"""Consistent hashing with bounded loads over a prompt's beginning, as KubeAI's PrefixHash strategy.

Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016); KubeAI documentation, "Load
Balancing" (kubeai.org/concepts/load-balancing): the same prefix goes to the same replica unless that one has more than
125 % of the average number of requests in flight, then to the next on the ring. The prefix ends with the first block
that not every prompt has, here the second; where a chat has an identifier, that is hashed instead.
"""

from bisect import bisect_left
from hashlib import blake2b
from math import ceil

from benchmarks.routing.references.base import View
from benchmarks.routing.workload import SimulatedRequest

LOAD_FACTOR, REPLICAS = 1.25, 256


class ConsistentHashing:
    """A ring of engines."""

    def __init__(self, prefix_blocks: int = 2) -> None:
        self._prefix_blocks = prefix_blocks
        self._ring: list[tuple[int, int]] = []

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """See Policy."""
        if not self._ring:
            numbers = range(len(view.engines))
            self._ring = sorted((_hash(f"{number}/{copy}"), number) for number in numbers for copy in range(REPLICAS))
        prefix = request.blocks[: self._prefix_blocks] or (-request.number - 1,)
        key = str(prefix) if request.session < 0 else f"session {request.session}"
        bound = ceil(LOAD_FACTOR * (sum(view.in_flight) + 1) / sum(view.serving))
        start = bisect_left(self._ring, (_hash(key), 0))
        for step in range(len(self._ring)):
            number = self._ring[(start + step) % len(self._ring)][1]
            if view.serving[number] and view.in_flight[number] < bound:
                return number
        raise AssertionError("an engine has at most the average")


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
