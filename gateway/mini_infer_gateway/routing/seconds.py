"""Converts costs in seconds to scores: criteria in one unit add up; with weights of 1 a second is a second."""

from collections.abc import Sequence
from operator import sub

from mini_infer_gateway.routing.base import (
    DISK_RATE,
    DISK_TOKENS,
    HOST_RATE,
    HOST_TOKENS,
    PAGE_WAIT,
    PREFILL_RATE,
    QUEUED_TOKENS,
    Features,
    Standing,
)

HORIZON_S = 60.0
"""Seconds above the best at which a score reaches its minimum: worse candidates are not distinguished."""


HOST_GUESS, DISK_GUESS = 4.0, 1.0
"""Rate of a tier until an engine reports one, as a multiple of its prefill rate: 128 KiB a token at 20 GB/s beside
40,000 computed tokens a second. A disk of unknown speed has no advantage over computing.
"""


def score_of(seconds: Sequence[float]) -> list[float]:
    """Returns 1 for the least, and less in proportion to the seconds above it."""
    best, per_second = 1.0 + min(seconds) / HORIZON_S, 1.0 / HORIZON_S
    return [best - value * per_second for value in seconds]


def costs_of(totals: Sequence[float]) -> list[float]:
    """Returns the seconds that these total scores stand for."""
    return [-HORIZON_S * total for total in totals]


def queue_seconds(features: Features) -> list[float]:
    """Returns the seconds until each candidate starts a new request: for its queued tokens, or until it has pages."""
    waits = [queued / rate for queued, rate in zip(features[QUEUED_TOKENS], features[PREFILL_RATE], strict=True)]
    return list(map(max, waits, features[PAGE_WAIT])) if any(features[PAGE_WAIT]) else waits


def load_seconds(features: Features) -> list[float]:
    """Returns the seconds in which each candidate loads its hit from slower tiers; never more than to compute it."""
    seconds = [0.0] * len(features[PREFILL_RATE])
    for tokens, rates, guess in (
        (features[HOST_TOKENS], features[HOST_RATE], HOST_GUESS),
        (features[DISK_TOKENS], features[DISK_RATE], DISK_GUESS),
    ):
        if any(tokens):
            each = zip(seconds, tokens, rates, features[PREFILL_RATE], strict=True)
            seconds = [one + count / max(rate or guess * prefill, prefill) for one, count, rate, prefill in each]
    return seconds


def costs_beside_queues(standing: Standing) -> dict[str, float]:
    """Returns by endpoint a choice's cost without the wait in the queue, which stays valid until caches change."""
    names = (candidate.name for candidate in standing.candidates)
    return dict(zip(names, map(sub, standing.costs_s, queue_seconds(standing.features)), strict=True))


def busy_share(features: Features) -> float:
    """Returns the share of endpoints that have prompt tokens to compute."""
    queued = list(features[QUEUED_TOKENS])
    return 1.0 - queued.count(0) / len(queued)
