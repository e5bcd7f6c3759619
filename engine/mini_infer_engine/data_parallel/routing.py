"""Which engine of a server gets a request: by what it holds of the prompt, then by what it has to do. Pure.

Everything is counted in prompt tokens that an engine could compute in the same time, so that a prefix and a queue can
be weighed against each other. Unlike a gateway's, these numbers are never late: the server sends every request itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

REQUEST_COST_TOKENS = 64
"""Of a request beside its tokens: its row in every pass that another request waits for, and the slot that it takes."""
RUNNING_TOKENS_PER_COST = 16
"""Tokens whose keys and values are read by every pass: so many of them weigh as much as one that must be computed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine as one request sees it."""

    held_tokens: int = 0
    """Of this prompt, in the prefix cache, or soon, since a request with the same beginning was sent there."""
    requests: int = 0
    """Sent there and not finished."""
    queued_tokens: int = 0
    """Of prompts that were sent there: tokens that it did not hold, of requests that have no output yet."""
    running_tokens: int = 0
    """Of requests with output: prompt and output together."""
    is_alive: bool = True

    def cost_tokens(self, prompt_tokens: int) -> float:
        """What the request waits for, and what it makes others wait for."""
        load = self.queued_tokens + self.requests * REQUEST_COST_TOKENS + self.running_tokens / RUNNING_TOKENS_PER_COST
        return prompt_tokens - min(self.held_tokens, prompt_tokens) + load


def choose_engine(prompt_tokens: int, candidates: Sequence[Candidate], turn: int) -> int | None:
    """The cheapest living engine's number; None: none lives.

    Among equals the one with the fewest requests; then they take turns, `turn` being the number of choices so far.
    """
    alive = [number for number, candidate in enumerate(candidates) if candidate.is_alive]
    if not alive:
        return None

    def order(number: int) -> tuple[float, int, int]:
        candidate = candidates[number]
        return candidate.cost_tokens(prompt_tokens), candidate.requests, (number - turn) % len(candidates)

    return min(alive, key=order)
