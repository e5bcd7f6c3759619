"""Chooses the engine of a request, by the cached part of its prompt and the engine's load. Pure.

Costs are counted in prompt tokens that an engine could compute in the same time, so that a prefix and a queue can be
weighed against each other. Unlike a gateway's, these numbers are never late: the server sends every request itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

REQUEST_COST_TOKENS = 64
"""Cost of a request beside its tokens: its row in every pass for which another request waits, and its slot."""
RUNNING_TOKENS_PER_COST = 16
"""Tokens of running requests that cost as much as one token to compute: every pass reads their keys and values."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine as one request sees it."""

    cached_tokens: int = 0
    """Tokens of this prompt in the prefix cache, or soon there because a request with the same prefix was sent."""
    requests: int = 0
    """Requests that were sent to the engine and have not finished."""
    queued_tokens: int = 0
    """Uncached prompt tokens of requests that were sent to the engine and have no output yet."""
    running_tokens: int = 0
    """Tokens of prompt and output of requests with output."""
    is_alive: bool = True

    def cost_tokens(self, prompt_tokens: int) -> float:
        """Returns the cost of the request at this engine: its own tokens to compute, and the load before it."""
        load = self.queued_tokens + self.requests * REQUEST_COST_TOKENS + self.running_tokens / RUNNING_TOKENS_PER_COST
        return prompt_tokens - min(self.cached_tokens, prompt_tokens) + load


def choose_engine(prompt_tokens: int, candidates: Sequence[Candidate], rotation: int) -> int | None:
    """Returns the number of the cheapest engine that is alive, or None if there is none.

    Ties go to the engine with the fewest requests, and then round-robin: `rotation` is the number of choices so far.
    """
    alive = [number for number, candidate in enumerate(candidates) if candidate.is_alive]
    if not alive:
        return None

    def order(number: int) -> tuple[float, int, int]:
        candidate = candidates[number]
        return candidate.cost_tokens(prompt_tokens), candidate.requests, (number - rotation) % len(candidates)

    return min(alive, key=order)
