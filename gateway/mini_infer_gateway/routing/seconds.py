"""Costs in seconds as scores: opinions in one unit can be added up; with weights of 1 a second is a second."""

from collections.abc import Sequence
from operator import add

from mini_infer_gateway.routing.base import AHEAD_TOKENS, QUEUED_TOKENS, Facts

HORIZON_S = 60.0
"""What is so much worse than the best is not told apart any more."""


def score_of(seconds: Sequence[float]) -> list[float]:
    """1 for the least, and less in proportion to the seconds above it."""
    best, per_second = 1.0 + min(seconds) / HORIZON_S, 1.0 / HORIZON_S
    return [best - value * per_second for value in seconds]


def busy_share(facts: Facts) -> float:
    """Of the endpoints, those that have prompt tokens to compute, or for which some wait: 0 to 1."""
    queued, ahead = facts[QUEUED_TOKENS], facts[AHEAD_TOKENS]
    work = list(map(add, queued, ahead)) if any(ahead) else list(queued)
    return 1.0 - work.count(0) / len(work)
