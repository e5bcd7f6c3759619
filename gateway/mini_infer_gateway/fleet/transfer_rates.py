"""Learns how fast KV cache moves between engines, and the fixed cost of a transfer. Pure: times come in.

Engines measure their links and send the rate in load reports. The fixed cost of a transfer (the handshake, the pages of
the last layer, waking the decode engine) is learned here from how much later than expected first tokens arrived.
Without new evidence both return to the first guess, since a cost that keeps requests away would never be measured
again.
"""

from collections.abc import Collection
from dataclasses import dataclass

from mini_infer_contract.events import LoadReport

FIRST_BYTES_PER_S = 4e9
"""Rate until an engine reports one: that of a slow network card, or from host memory to host memory on one machine."""
KV_BYTES_PER_TOKEN = 64 << 10
"""Size until an engine reports it: that of some billion parameters with GQA (28 layers, 4 heads of 128: 56 KiB)."""
SLOWEST_TOKENS_PER_S, FASTEST_TOKENS_PER_S = 1.0, 1e10
"""Bounds of a reported rate, which is in the mean of all."""
FIRST_FIXED_S = 0.005
LONGEST_FIXED_S = 1.0
GAIN = 0.1
"""Weight of the newest transfer's lateness."""
EXPIRY_S = 60.0
"""Half-life of the learned fixed cost in seconds, and the age at which an unchanged rate of a link is ignored."""


@dataclass(slots=True)
class _ReportedRate:
    """An endpoint's measurement, with the times of the first and the last report of it, by the endpoint's own clock."""

    bytes_per_s: float
    tokens_per_s: float
    first_s: float
    last_s: float

    @property
    def is_fresh(self) -> bool:
        return self.last_s - self.first_s < EXPIRY_S


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of moving KV cache to an engine."""

    tokens_per_s: float
    fixed_s: float

    def seconds(self, tokens: float) -> float:
        """Returns the seconds to move the cache of these tokens."""
        return self.fixed_s + tokens / self.tokens_per_s


class TransferRates:
    """The transfer rates of all endpoints."""

    def __init__(self) -> None:
        self._reported: dict[str, _ReportedRate] = {}
        self._lateness_s, self._learned_s = 0.0, 0.0

    def link(self, to: str, source: str, now_s: float) -> Link:
        """Returns the current link between two endpoints."""
        return Link(self.tokens_per_s(to, source), self._fixed_s(now_s))

    def tokens_per_s(self, to: str, source: str) -> float:
        """Returns the receiver's own measurement, else the sender's, else the mean of all."""
        for endpoint in (to, source):
            if (reported := self._reported.get(endpoint)) and reported.is_fresh:
                return reported.tokens_per_s
        fresh = [reported.tokens_per_s for reported in self._reported.values() if reported.is_fresh]
        return sum(fresh) / len(fresh) if fresh else FIRST_BYTES_PER_S / KV_BYTES_PER_TOKEN

    def report(self, endpoint: str, report: LoadReport) -> None:
        """Takes a load report."""
        rate, reported = report.transfer_bytes_per_s, self._reported.get(endpoint)
        if reported and reported.bytes_per_s == rate:
            reported.last_s = report.ts
        elif rate > 0:
            tokens_per_s = rate / (report.kv_bytes_per_token or KV_BYTES_PER_TOKEN)
            tokens_per_s = min(FASTEST_TOKENS_PER_S, max(SLOWEST_TOKENS_PER_S, tokens_per_s))
            self._reported[endpoint] = _ReportedRate(rate, tokens_per_s, report.ts, report.ts)

    def observe(self, expected_s: float, took_s: float, now_s: float) -> None:
        """Records the seconds to a first token whose prompt another engine computed, and those expected."""
        lateness_s = self._fixed_s(now_s) - FIRST_FIXED_S + GAIN * (took_s - expected_s)
        self._lateness_s = min(LONGEST_FIXED_S, max(-FIRST_FIXED_S, lateness_s))
        self._learned_s = now_s

    def keep(self, endpoints: Collection[str]) -> None:
        """Forgets all other endpoints, which are removed."""
        for endpoint in self._reported.keys() - endpoints:
            del self._reported[endpoint]

    def _fixed_s(self, now_s: float) -> float:
        kept: float = 0.5 ** ((now_s - self._learned_s) / EXPIRY_S)
        return FIRST_FIXED_S + self._lateness_s * kept
