"""NVIDIA Dynamo's KV router: the lowest sum of prefill and decode blocks.

Source: Dynamo documentation, "Routing Concepts" (docs.nvidia.com/dynamo, components/router): cost = weight (1 by
default) x prefill blocks (prompt work already at the worker, and what of this prompt is not cached there) + decode
blocks (KV blocks of the worker's active sequences, with this request's); temperature 0 takes the lowest.
"""

from random import Random

from benchmarks.routing.references.base import View
from benchmarks.routing.workload import SimulatedRequest


class Dynamo:
    """Prefill and decode blocks."""

    def __init__(self) -> None:
        self._random = Random(0)

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """See Policy."""
        costs = []
        for number, engine in enumerate(view.engines):
            missing = request.prompt_tokens / view.block_tokens - view.hit_blocks(request, number)
            prefill = engine.queued_tokens() / view.block_tokens + missing
            active = engine.shape.kv_blocks - engine.free_pages
            waiting = sum(entry.known_tokens for entry in engine.waiting) / view.block_tokens
            costs.append(prefill + active + waiting)
        best = min(costs)
        return self._random.choice([number for number, cost in enumerate(costs) if cost - best < 1e-9])
