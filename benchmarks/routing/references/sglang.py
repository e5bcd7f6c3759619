"""The cache-aware policy of SGLang's router and of smg.

Source: smg documentation, "Cache-Aware Routing" and "Load Balancing" (lightseekorg/smg, docs/concepts/routing): a radix
tree of what was sent to each worker; where the loads differ by more than 64 requests and by more than 1.5 times, the
least loaded worker is taken; else the worker with the longest match if that is more than 0.3 of the prompt, else the
worker with the smallest tree.
"""

from collections import OrderedDict

from benchmarks.routing.references.base import View
from benchmarks.routing.workload import SimulatedRequest

CACHE_THRESHOLD, BALANCE_ABSOLUTE, BALANCE_RELATIVE = 0.3, 64, 1.5


class CacheAware:
    """Its own trees (an LRU list of blocks for each worker, as large as the worker's cache), its own loads."""

    def __init__(self) -> None:
        self._trees: list[OrderedDict[int, None]] = []

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """See Policy."""
        if not self._trees:
            self._trees = [OrderedDict() for _ in view.engines]
        chosen = self._choose(request, view)
        tree = self._trees[chosen]
        for block in reversed(request.blocks[: request.prompt_tokens // view.block_tokens]):
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > view.engines[chosen].shape.kv_blocks:
            tree.popitem(last=False)
        return chosen

    def _choose(self, request: SimulatedRequest, view: View) -> int:
        loads = view.in_flight
        least, most = min(loads), max(loads)
        if most - least > BALANCE_ABSOLUTE and most > BALANCE_RELATIVE * least:
            return loads.index(least)
        matches = [self._match(request, tree) for tree in self._trees]
        best = max(range(len(matches)), key=matches.__getitem__)
        if matches[best] * view.block_tokens > CACHE_THRESHOLD * request.prompt_tokens:
            return best
        return min(range(len(self._trees)), key=lambda number: len(self._trees[number]))

    def _match(self, request: SimulatedRequest, tree: "OrderedDict[int, None]") -> int:
        count = 0
        for block in request.blocks:
            if block not in tree:
                break
            count += 1
        return count
