"""llm-d's inference scheduler: a weighted sum of scores.

Source: llm-d documentation, "Request Scheduler" (llm-d.ai/docs/architecture/core/router/epp/scheduling), the guide to
the optimized baseline, and the same defaults in the scheduler's pkg/epp/config/loader/defaults.go (520af478), where
flow control is a feature gate that is off: prefix-cache-scorer weight 3 (share of the prompt that is cached),
queue-scorer weight 2 (waiting requests, scaled between the least and the most among candidates), weight 2 for
kv-cache-utilization-scorer (1 - usage), and the highest sum wins.
"""

from random import Random

from benchmarks.routing.references.base import View
from benchmarks.routing.workload import SimulatedRequest

PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0


class LlmD:
    """Three scorers and the highest sum; at random among equals."""

    def __init__(self) -> None:
        self._random = Random(0)

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """See Policy."""
        numbers = view.numbers()
        waiting = {number: len(view.engines[number].waiting) for number in numbers}
        least, most = min(waiting.values()), max(waiting.values())
        whole = max(1, request.prompt_tokens // view.block_tokens)
        scores = []
        for number in numbers:
            engine = view.engines[number]
            prefix = view.hit_blocks(request, number) / whole
            queue = (most - waiting[number]) / (most - least) if most > least else 1.0
            usage = 1 - engine.free_pages / engine.shape.kv_blocks
            scores.append(PREFIX_WEIGHT * prefix + QUEUE_WEIGHT * queue + KV_WEIGHT * (1 - usage))
        best = max(scores)
        return self._random.choice(
            [number for number, score in zip(numbers, scores, strict=True) if best - score < 1e-9]
        )
