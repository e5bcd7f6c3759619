"""Remembers how many cached tokens a second each endpoint loads from main memory and from its disk. Pure.

Engines measure both and send them in load reports. An endpoint that has not measured a tier yet is judged by the mean
of those that have: endpoints of a fleet are mostly alike.
"""

from collections.abc import Collection, Sequence

from mini_infer_contract.events import LoadReport


class _Rates:
    """The rates of one tier by endpoint."""

    def __init__(self) -> None:
        self._reported: dict[str, float] = {}
        self._mean = 0.0

    def __bool__(self) -> bool:
        return bool(self._reported)

    def set(self, endpoint: str, tokens_per_s: float) -> None:
        if tokens_per_s > 0 and self._reported.get(endpoint) != tokens_per_s:
            self._reported[endpoint] = tokens_per_s
            self._average()

    def keep(self, endpoints: Collection[str]) -> None:
        if self._reported.keys() - endpoints:
            self._reported = {name: rate for name, rate in self._reported.items() if name in endpoints}
            self._average()

    def of(self, endpoints: Sequence[str]) -> list[float]:
        return [self._reported.get(endpoint, self._mean) for endpoint in endpoints]

    def _average(self) -> None:
        self._mean = sum(self._reported.values()) / max(1, len(self._reported))


class TierRates:
    """The load rates of all endpoints."""

    def __init__(self) -> None:
        self._host, self._disk = _Rates(), _Rates()

    def report(self, endpoint: str, report: LoadReport) -> None:
        """Takes a load report."""
        self._host.set(endpoint, report.host_tokens_per_s)
        self._disk.set(endpoint, report.disk_tokens_per_s)

    def all_tokens_per_s(self, endpoints: Sequence[str]) -> tuple[list[float], list[float]]:
        """Returns the rates of these endpoints from main memory, and from the disk; 0 if no endpoint reported any."""
        if not self._host and not self._disk:
            nothing = [0.0] * len(endpoints)
            return nothing, nothing
        return self._host.of(endpoints), self._disk.of(endpoints)

    def keep(self, endpoints: Collection[str]) -> None:
        """Forgets all other endpoints, which are removed."""
        self._host.keep(endpoints)
        self._disk.keep(endpoints)
