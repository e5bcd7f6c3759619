"""How fast KV cache moves between engines, and what a transfer costs beside its bytes: learned. Pure: times come in.

Engines measure their links and tell the rate in load reports. The fixed cost of a transfer (the hand-over, the pages of
the last layer, waking the decode engine) is learned here from how much later than expected first tokens came. Without
new evidence both return to the first guess, since a cost that keeps requests away would never be measured again.
"""

from collections.abc import Collection
from dataclasses import dataclass

from mini_infer_contract.events import LoadReport

FIRST_BYTES_PER_S = 4e9
"""Until an engine tells: a slow network card, or host memory to host memory on one machine."""
KV_BYTES_PER_TOKEN = 64 << 10
"""Where an engine does not tell: some billion parameters, grouped-query attention (28 layers, 4 heads of 128: 56)."""
FIRST_FIXED_S = 0.005
LONGEST_FIXED_S = 1.0
GAIN = 0.1
"""Of the newest transfer's lateness."""
FORGOTTEN_AFTER_S = 60.0
"""Half of what was learned of the fixed cost, and a link's rate that has not changed for as long."""


@dataclass(slots=True)
class _Told:
    """An endpoint's measurement, and when it told it first and last, by its own clock."""

    bytes_per_s: float
    tokens_per_s: float
    first_s: float
    last_s: float

    @property
    def is_fresh(self) -> bool:
        return self.last_s - self.first_s < FORGOTTEN_AFTER_S


@dataclass(frozen=True, slots=True)
class Link:
    """What moving KV cache to an engine costs."""

    tokens_per_s: float
    fixed_s: float

    def seconds(self, tokens: float) -> float:
        """For the cache of so many tokens."""
        return self.fixed_s + tokens / self.tokens_per_s


class TransferRates:
    """Of all endpoints."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}
        self._lateness_s, self._learned_s = 0.0, 0.0

    def link(self, to: str, source: str, now_s: float) -> Link:
        """Between two endpoints, as it is now."""
        return Link(self.tokens_per_s(to, source), self._fixed_s(now_s))

    def tokens_per_s(self, to: str, source: str) -> float:
        """The receiver's own measurement, else the sender's, else that of all."""
        for endpoint in (to, source):
            if (told := self._told.get(endpoint)) and told.is_fresh:
                return told.tokens_per_s
        fresh = [told.tokens_per_s for told in self._told.values() if told.is_fresh]
        return sum(fresh) / len(fresh) if fresh else FIRST_BYTES_PER_S / KV_BYTES_PER_TOKEN

    def report(self, endpoint: str, report: LoadReport) -> None:
        """A load report."""
        rate, told = report.transfer_bytes_per_s, self._told.get(endpoint)
        if told and told.bytes_per_s == rate:
            told.last_s = report.ts
        elif rate > 0:
            tokens_per_s = rate / (report.kv_bytes_per_token or KV_BYTES_PER_TOKEN)
            self._told[endpoint] = _Told(rate, tokens_per_s, report.ts, report.ts)

    def observe(self, expected_s: float, took_s: float, now_s: float) -> None:
        """A first token whose prompt was computed elsewhere came after `took_s`, where `expected_s` was expected."""
        lateness_s = self._fixed_s(now_s) - FIRST_FIXED_S + GAIN * (took_s - expected_s)
        self._lateness_s = min(LONGEST_FIXED_S, max(-FIRST_FIXED_S, lateness_s))
        self._learned_s = now_s

    def keep(self, endpoints: Collection[str]) -> None:
        """Forgets all others: they are gone."""
        for endpoint in self._told.keys() - endpoints:
            del self._told[endpoint]

    def _fixed_s(self, now_s: float) -> float:
        kept: float = 0.5 ** ((now_s - self._learned_s) / FORGOTTEN_AFTER_S)
        return FIRST_FIXED_S + self._lateness_s * kept
