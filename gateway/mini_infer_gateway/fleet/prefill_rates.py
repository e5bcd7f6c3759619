"""How many prompt tokens a second each endpoint computes while it has some to compute, learned from what it does.

Three sources: what engines measured themselves and tell in load reports; where none does, the tokens that a queue lost
between two of them; and the time to the first byte of a long prompt where there are no reports. Endpoints of a fleet
are mostly alike, so little evidence about one counts for little: its rate is that of all until its own observations
outweigh them. Pure: times come with the observations.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mini_infer_contract.events import LoadReport

FIRST_GUESS = 20_000.0
"""Tokens a second, until something is known: a model of some billion parameters on a datacentre GPU, or less."""
GUESS_TOKENS = 8192
"""What the first guess weighs against observations."""
FLEET_TOKENS = 200_000
"""What the fleet's rate weighs against an endpoint's own: some seconds of work."""
ALIKE = 0.2
"""Endpoints that differ by less are taken for equal: else the one that looks fastest gets all that is free to go."""
MEMORY_TOKENS = 1_000_000
"""Observations are forgotten by half after so many tokens."""
LEAST_TOKENS = 1024
"""An observation of fewer is mostly the wait for a pass to end."""
SLOWEST, FASTEST = 100.0, 5_000_000.0


@dataclass(slots=True)
class _Observed:
    tokens: float = 0.0
    seconds: float = 0.0
    report_s: float = 0.0
    queued: int = 0
    launched: int = 0
    """Tokens that left the queue before the latest report: their pass runs until the next one. 0: not known."""

    def add(self, tokens: float, seconds: float) -> None:
        keep = 0.5 ** (tokens / MEMORY_TOKENS)
        self.tokens, self.seconds = self.tokens * keep + tokens, self.seconds * keep + seconds


class PrefillRates:
    """All endpoints'."""

    def __init__(self) -> None:
        self._observed: dict[str, _Observed] = {}
        self._told: dict[str, float] = {}
        """Endpoint -> tokens a second, by its own measurement."""
        self._mean_told = 0.0
        self._tokens, self._seconds = float(GUESS_TOKENS), GUESS_TOKENS / FIRST_GUESS
        """The first guess and all observations that are remembered."""

    def tokens_per_s(self, endpoint: str) -> float:
        """Of this endpoint if it differs from the others, else of all together."""
        fleet = self._fleet
        own = self._own(endpoint, fleet)
        return _bounded(fleet if fleet * (1.0 - ALIKE) <= own <= fleet * (1.0 + ALIKE) else own)

    def all_tokens_per_s(self, endpoints: Sequence[str]) -> list[float]:
        """The same of several."""
        fleet = self._fleet
        own = [self._own(endpoint, fleet) for endpoint in endpoints]
        least, most, bounded = fleet * (1.0 - ALIKE), fleet * (1.0 + ALIKE), _bounded(fleet)
        return [bounded if least <= rate <= most else _bounded(rate) for rate in own]

    @property
    def _fleet(self) -> float:
        return self._mean_told or self._tokens / self._seconds

    def _own(self, endpoint: str, fleet: float) -> float:
        """As it tells, or by its own observations, with a rate of all that weighs as much as FLEET_TOKENS."""
        if self._told:
            return self._told.get(endpoint, fleet)
        if own := self._observed.get(endpoint):
            return (own.tokens + FLEET_TOKENS) / (own.seconds + FLEET_TOKENS / fleet)
        return fleet

    def report(self, endpoint: str, report: LoadReport) -> None:
        """A load report. A queue loses tokens when their pass is launched, which is when the pass before has ended."""
        if report.prefill_tokens_per_s > 0:
            self._told[endpoint] = report.prefill_tokens_per_s
            self._mean_told = sum(self._told.values()) / len(self._told)
        own = self._observed.setdefault(endpoint, _Observed())
        if own.launched:
            self._add(own, own.launched, report.ts - own.report_s)
        # Where requests arrived in between, what the queue lost is hidden by what they brought.
        own.launched = 0 if report.accepted else max(0, own.queued - report.queued_tokens)
        own.report_s, own.queued = report.ts, report.queued_tokens

    def observe(self, endpoint: str, tokens: int, took_s: float) -> None:
        """So many tokens, with those that were queued before them, took that long."""
        self._add(self._observed.setdefault(endpoint, _Observed()), tokens, took_s)

    def keep(self, endpoints: Collection[str]) -> None:
        """Forgets all others: they are gone."""
        if self._told.keys() - endpoints:
            self._told = {name: rate for name, rate in self._told.items() if name in endpoints}
            self._mean_told = sum(self._told.values()) / max(1, len(self._told))
        for endpoint in self._observed.keys() - endpoints:
            own = self._observed.pop(endpoint)
            self._tokens, self._seconds = self._tokens - own.tokens, self._seconds - own.seconds

    def _add(self, own: _Observed, tokens: int, took_s: float) -> None:
        if tokens >= LEAST_TOKENS and took_s > 0:
            before = own.tokens, own.seconds
            own.add(tokens, took_s)
            self._tokens += own.tokens - before[0]
            self._seconds += own.seconds - before[1]


def _bounded(rate: float) -> float:
    return min(FASTEST, max(SLOWEST, rate))
