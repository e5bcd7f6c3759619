"""Learns how many prompt tokens a second each endpoint computes while it has any to compute. Pure.

There are three sources: rates that engines measured themselves and send in load reports; if none does, the tokens that
a queue lost between two reports; and the time to first byte of a long prompt if there are no reports. Endpoints of a
fleet are mostly alike, so little evidence about one counts for little: its rate is that of all until its own
observations outweigh them. Times come with the observations.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mini_infer_contract.events import LoadReport

FIRST_GUESS = 20_000.0
"""Tokens a second until something is known: a model of some billion parameters on a datacentre GPU, or less."""
GUESS_TOKENS = 8192
"""Weight of the first guess against observations, in tokens."""
FLEET_TOKENS = 200_000
"""Weight of the fleet's rate against an endpoint's own, in tokens: some seconds of work."""
ALIKE = 0.2
"""Relative difference below which endpoints count as equal: otherwise the seemingly fastest one gets all requests."""
MEMORY_TOKENS = 1_000_000
"""Half-life of observations, in tokens."""
LEAST_TOKENS = 1024
"""Smallest observation in tokens; a smaller one is mostly the wait for a pass to end."""
MOST_TOKENS = 10_000_000
"""Largest observation in tokens: no queue loses more between two reports."""
SLOWEST, FASTEST = 100.0, 5_000_000.0


@dataclass(slots=True)
class _Observed:
    tokens: float = 0.0
    seconds: float = 0.0
    report_s: float = 0.0
    queued: int = 0
    launched: int = 0
    """Tokens that left the queue before the latest report, whose pass runs until the next report; 0 if unknown."""

    def add(self, tokens: float, seconds: float) -> None:
        keep = 0.5 ** (tokens / MEMORY_TOKENS)
        self.tokens, self.seconds = self.tokens * keep + tokens, self.seconds * keep + seconds


class PrefillRates:
    """The prefill rates of all endpoints."""

    def __init__(self) -> None:
        self._observed: dict[str, _Observed] = {}
        self._reported: dict[str, float] = {}
        """Tokens a second by endpoint, from its own measurement."""
        self._mean_reported = 0.0
        self._tokens, self._seconds = float(GUESS_TOKENS), GUESS_TOKENS / FIRST_GUESS
        """Sums of the first guess and all remembered observations."""

    def tokens_per_s(self, endpoint: str) -> float:
        """Returns the rate of this endpoint if it differs from the others, else the rate of the fleet."""
        fleet = self._fleet
        own = self._own(endpoint, fleet)
        return _bounded(fleet if fleet * (1.0 - ALIKE) <= own <= fleet * (1.0 + ALIKE) else own)

    def all_tokens_per_s(self, endpoints: Sequence[str]) -> list[float]:
        """Returns `tokens_per_s` of each of these endpoints."""
        fleet = self._fleet
        own = [self._own(endpoint, fleet) for endpoint in endpoints]
        least, most, bounded = fleet * (1.0 - ALIKE), fleet * (1.0 + ALIKE), _bounded(fleet)
        return [bounded if least <= rate <= most else _bounded(rate) for rate in own]

    @property
    def _fleet(self) -> float:
        return self._mean_reported or self._tokens / self._seconds

    def _own(self, endpoint: str, fleet: float) -> float:
        """Returns the rate that an endpoint reports, or its observed rate with a prior of FLEET_TOKENS."""
        if self._reported:
            return self._reported.get(endpoint, fleet)
        if own := self._observed.get(endpoint):
            return (own.tokens + FLEET_TOKENS) / (own.seconds + FLEET_TOKENS / fleet)
        return fleet

    def report(self, endpoint: str, report: LoadReport) -> None:
        """Takes a load report. A queue loses tokens as their pass is launched, which is when the previous one ends."""
        if report.prefill_tokens_per_s > 0:
            self._reported[endpoint] = _bounded(report.prefill_tokens_per_s)
            self._mean_reported = sum(self._reported.values()) / len(self._reported)
        own = self._observed.setdefault(endpoint, _Observed())
        if own.launched:
            self._add(own, own.launched, report.ts - own.report_s)
        # Where requests arrived in between, what the queue lost is hidden by what they brought.
        own.launched = 0 if report.accepted else max(0, own.queued - report.queued_tokens)
        own.report_s, own.queued = report.ts, report.queued_tokens

    def observe(self, endpoint: str, tokens: int, took_s: float) -> None:
        """Records the seconds that these tokens took, which include those queued before them."""
        self._add(self._observed.setdefault(endpoint, _Observed()), tokens, took_s)

    def keep(self, endpoints: Collection[str]) -> None:
        """Forgets all other endpoints, which are removed."""
        if self._reported.keys() - endpoints:
            self._reported = {name: rate for name, rate in self._reported.items() if name in endpoints}
            self._mean_reported = sum(self._reported.values()) / max(1, len(self._reported))
        for endpoint in self._observed.keys() - endpoints:
            own = self._observed.pop(endpoint)
            self._tokens, self._seconds = self._tokens - own.tokens, self._seconds - own.seconds

    def _add(self, own: _Observed, tokens: int, took_s: float) -> None:
        # No engine is so fast or so slow: its report is wrong, and would spoil the mean of all.
        if LEAST_TOKENS <= tokens <= MOST_TOKENS and took_s > 0 and SLOWEST <= tokens / took_s <= FASTEST:
            before = own.tokens, own.seconds
            own.add(tokens, took_s)
            self._tokens += own.tokens - before[0]
            self._seconds += own.seconds - before[1]


def _bounded(rate: float) -> float:
    return min(FASTEST, max(SLOWEST, rate))
