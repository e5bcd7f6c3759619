"""The load of services as a gateway reports it to what scales them: `GET /scaling` on its admin port.

Counters begin with the gateway and only grow, so that readers take differences, and a missed answer loses nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

SCALING_PATH = "/scaling"
LATENCY_BUCKETS_S = tuple(round(0.002 * 1.35**power, 6) for power in range(40))
"""Upper bounds of the buckets of latencies: 2 ms to 240 s, each 35 % above the one before; one more has the rest."""


def bucket_of(seconds: float) -> int:
    """Returns the index of the bucket that counts this latency."""
    return bisect_left(LATENCY_BUCKETS_S, seconds)


def percentile_s(counts: Sequence[int], share: float) -> float | None:
    """Returns the upper bound of the bucket that contains this percentile; None if nothing was counted."""
    left = share * sum(counts)
    if not left:
        return None
    for count, bound in zip(counts, LATENCY_BUCKETS_S, strict=False):
        left -= count
        if left <= 0:
            return bound
    return LATENCY_BUCKETS_S[-1]


class EngineLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """One engine, as its own load reports say. Every gateway reports the same engines."""

    role: str = "unified"
    running: int = 0
    queued_tokens: int = 0
    """Prompt tokens that are neither cached nor computed yet."""
    prefill_tokens_per_s: float = 0.0
    """The rate at which it computes prompts, as learned; 0 if nothing is known."""


class ServiceLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """One service at one gateway."""

    requests: int = 0
    """Requests that have arrived since the gateway started."""
    prompt_tokens: int = 0
    """Their prompt tokens, without those that engines had cached."""
    answers: int = 0
    """Answers of known length that have ended since then."""
    output_tokens: int = 0
    """Their tokens."""
    queued_requests: int = 0
    """Requests that wait here for an engine with room, or for any engine."""
    queued_tokens: int = 0
    """Their prompt tokens, without cached ones."""
    running_requests: int = 0
    """Requests that were sent to engines and have not ended."""
    tokens_in_flight: int = 0
    """Their prompt tokens, and the tokens that they have got so far."""
    ttft_counts: list[int] = []
    """Streams by seconds to their first token, in buckets of LATENCY_BUCKETS_S; empty: none."""
    itl_counts: list[int] = []
    """Streams that have ended, by their mean seconds between two tokens, likewise."""
    engines: dict[str, EngineLoad] = {}
    """The service's ready engines by name."""


class GatewayLoads(msgspec.Struct, frozen=True):
    """One gateway's report."""

    started_s: float
    """When the gateway started, in seconds since the epoch: with another value, counters have begun anew."""
    services: dict[str, ServiceLoad] = {}
    """Services by namespace/name."""
