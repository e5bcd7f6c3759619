"""NVIDIA Dynamo's KV router: the lowest sum of prefill and decode blocks, and a queue once every worker is busy.

Source: ai-dynamo/dynamo, lib/kv-router/src/scheduling. selector/default.rs (07a6c9ce): cost = prefill blocks (prompt
work already at the worker, and what of this prompt is not cached there) + decode blocks (whole prompt blocks of the
worker's active requests, each once, with this request's); temperature 0 takes the lowest, at random among equals.
queue.rs and config.rs: while every worker has more than `router_queue_threshold` (16.0) x max_num_batched_tokens of
prompt to compute, requests wait at the router, first come, first served. Output blocks are not tracked by default.
"""

from random import Random

from benchmarks.routing.references.base import View
from benchmarks.routing.workload import SimulatedRequest

QUEUE_THRESHOLD, BATCHED_TOKENS = 16.0, 8192


class Dynamo:
    """Prefill and decode blocks."""

    def __init__(self) -> None:
        self._random = Random(0)

    def admits(self, view: View) -> bool:
        """See QueueingPolicy."""
        limit = QUEUE_THRESHOLD * BATCHED_TOKENS
        return any(view.engines[number].queued_tokens() <= limit for number in view.numbers())

    def choose(self, request: SimulatedRequest, view: View) -> int:
        """See Policy."""
        numbers, costs = view.numbers(), []
        blocks = request.blocks[: request.prompt_tokens // view.block_tokens]
        for number in numbers:
            missing = request.prompt_tokens / view.block_tokens - view.hit_blocks(request, number)
            prefill = view.engines[number].queued_tokens() / view.block_tokens + missing
            active = view.active_blocks[number]
            new = sum(block not in active for block in blocks)
            partial = view.in_flight[number] + 1  # a prompt's last block is shared with none
            costs.append(prefill + len(active) + new + partial)
        best = min(costs)
        return self._random.choice([number for number, cost in zip(numbers, costs, strict=True) if cost - best < 1e-9])
