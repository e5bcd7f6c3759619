"""The figures of two revisions side by side, as a gateway reports them to what judges a canary: `GET /rollouts`.

As in `scaling`, counters only grow while a gateway runs and observes a canary, so that readers take differences.
"""

from bisect import bisect_left

import msgspec

ROLLOUTS_PATH = "/rollouts"
FIRST_TOKEN_UNIT_TOKENS = 512
"""Times to the first token count for each so many uncached prompt tokens begun: a new engine has an empty cache, and is
not slower for it.
"""
DIVERGENCE_BUCKETS = tuple(round(0.001 * 2**power, 6) for power in range(14))
"""Upper bounds of the buckets of divergences: 0.001 to 8.2 nats a token, each twice the one before; one more has the
rest.
"""


def divergence_bucket_of(nats: float) -> int:
    """Returns the index of the bucket that counts this divergence."""
    return bisect_left(DIVERGENCE_BUCKETS, nats)


class RevisionFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """One revision of a service at one gateway, since the gateway observes the canary."""

    requests: int = 0
    """Requests that its engines were sent and that have ended there, copies included."""
    errors: int = 0
    """The number that an engine failed: no connection, a broken or late answer, a 5xx, an error in a stream."""
    rejected: int = 0
    """The number that an engine answered with a 4xx other than 429; of copies, whose original was answered, these are
    errors.
    """
    copies: int = 0
    """Copies of other revisions' requests among the requests; nobody received their answers."""
    ttft_counts: list[int] = []
    """Streams by seconds to the first token for each FIRST_TOKEN_UNIT_TOKENS of uncached prompt tokens begun, in
    buckets of `scaling.LATENCY_BUCKETS_S`; empty: none.
    """
    itl_counts: list[int] = []
    """Streams that have ended, by their mean seconds between two tokens, likewise."""
    whole_counts: list[int] = []
    """Answers that were no streams, by their seconds for each token of the answer, likewise."""
    replays: int = 0
    """Answers of the other revision that its engines have scored."""
    unscored: int = 0
    """Answers of the other revision that its engines refused or failed to score."""
    divergence_sum: float = 0.0
    """Sum over the replays of the mean absolute difference of log probabilities, in nats a token."""
    divergence_counts: list[int] = []
    """Replays by that difference, in buckets of DIVERGENCE_BUCKETS; empty: none."""
    memory_bytes: dict[str, int] = {}
    """Anonymous memory of each of its engines that reports it, now."""


class GatewayRollouts(msgspec.Struct, frozen=True):
    """One gateway's report."""

    started_s: float
    """When the gateway started, in seconds since the epoch: with another value, counters have begun anew."""
    services: dict[str, dict[str, RevisionFigures]] = {}
    """Figures by revision, of each service that has a canary, by namespace/name."""
