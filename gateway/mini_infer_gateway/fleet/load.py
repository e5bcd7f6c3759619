"""Tracks the load of each endpoint: its last report, plus those of our requests that the report cannot contain yet.

Reports name the requests that arrived since the previous report. Those are dropped here, so that all gateway replicas
arrive at the same number. An endpoint that has never reported is judged by our requests in flight. Pure: no clock, no
socket.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mini_infer_contract.events import LoadReport


class Load(NamedTuple):
    """The work that an endpoint has to do."""

    running: int
    waiting: int
    queued_tokens: int
    kv_usage: float
    unreported: int = 0
    """Number of our requests, among the running ones, that no report has counted yet."""
    reported: bool = True
    """True if the endpoint reports its load. Otherwise this is our requests in flight there, which include
    non-streaming requests until their answers are complete.
    """
    engines: int = 1
    """Copies of the model behind the endpoint, each with its own queue."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A request that we sent; it counts until `finish`."""

    endpoint: str
    request_id: str
    uncached_tokens: int
    answered: bool = False
    """True once its first byte has arrived, so that its prompt is computed."""


@dataclass(slots=True)
class _Ours:
    """Our own requests at one endpoint."""

    flights: set[InFlight] = field(default_factory=set)
    queued_tokens: int = 0
    """Uncached tokens of the requests whose first byte has not arrived."""

    def add(self, flight: InFlight) -> None:
        self.flights.add(flight)
        self.queued_tokens += flight.uncached_tokens

    def answered(self, flight: InFlight) -> None:
        if flight in self.flights and not flight.answered:
            self.queued_tokens -= flight.uncached_tokens
        flight.answered = True

    def remove(self, flight: InFlight) -> None:
        if flight in self.flights:
            self.flights.remove(flight)
            self.queued_tokens -= 0 if flight.answered else flight.uncached_tokens


class LoadLedger:
    """The load reports and requests in flight of all endpoints."""

    def __init__(self) -> None:
        self._reports: dict[str, LoadReport] = {}
        self._ours: dict[str, _Ours] = {}
        self._loads: dict[str, Load] = {}
        """Cached results of `load` that are still valid."""
        self._unreported: dict[str, dict[str, list[InFlight]]] = {}
        """Unreported requests by endpoint and request id: as many as a client sent under one id."""
        self.on_report: Callable[[str, LoadReport], None] = lambda endpoint, report: None
        """Called after a report was taken."""

    def start(self, endpoint: str, request_id: str, uncached_tokens: int) -> InFlight:
        """Counts a request from the routing decision on, before the endpoint can know of it."""
        flight = InFlight(endpoint, request_id, uncached_tokens)
        self._ours.setdefault(endpoint, _Ours()).add(flight)
        self._unreported.setdefault(endpoint, {}).setdefault(request_id, []).append(flight)
        self._loads.pop(endpoint, None)
        return flight

    def answered(self, flight: InFlight) -> None:
        """Records that the first byte arrived: the prompt is computed."""
        if ours := self._ours.get(flight.endpoint):
            ours.answered(flight)
        self._loads.pop(flight.endpoint, None)

    def finish(self, flight: InFlight) -> None:
        """Forgets a request that ended, however it ended."""
        self._loads.pop(flight.endpoint, None)
        if ours := self._ours.get(flight.endpoint):
            ours.remove(flight)
        unreported = self._unreported.get(flight.endpoint)
        if unreported and (same_id := unreported.get(flight.request_id)) and flight in same_id:
            same_id.remove(flight)
            if not same_id:
                del unreported[flight.request_id]

    def report(self, endpoint: str, report: LoadReport) -> None:
        """Takes an endpoint's load report."""
        self._reports[endpoint] = report
        self._loads.pop(endpoint, None)
        unreported = self._unreported.get(endpoint)
        if unreported:
            for request_id in report.accepted:
                if same_id := unreported.get(request_id):
                    same_id.pop(0)
                    if not same_id:
                        del unreported[request_id]
        self.on_report(endpoint, report)

    def silence(self, endpoint: str) -> None:
        """Drops the last report of an endpoint whose reports stopped (its socket is closed): it is no longer valid."""
        self._loads.pop(endpoint, None)
        self._reports.pop(endpoint, None)

    def remove(self, endpoint: str) -> None:
        """Forgets an endpoint that was removed; requests still in flight there end by themselves."""
        self._loads.pop(endpoint, None)
        self._reports.pop(endpoint, None)
        self._ours.pop(endpoint, None)
        self._unreported.pop(endpoint, None)

    def in_flight(self, endpoint: str) -> int:
        """Returns the number of our own requests there."""
        ours = self._ours.get(endpoint)
        return len(ours.flights) if ours else 0

    def memory_bytes(self, endpoint: str) -> int:
        """Returns the main memory of an endpoint's processes by its last report; 0 if it reports none."""
        report = self._reports.get(endpoint)
        return report.memory_bytes if report else 0

    def load(self, endpoint: str) -> Load:
        """Returns the current load of an endpoint."""
        return self._loads.get(endpoint) or self._worked_out(endpoint)

    def loads(self, endpoints: Sequence[str]) -> list[Load]:
        """Returns the current load of each of these endpoints."""
        reported, work_out = self._loads.get, self._worked_out
        return [reported(endpoint) or work_out(endpoint) for endpoint in endpoints]

    def _worked_out(self, endpoint: str) -> Load:
        load = self._loads[endpoint] = self._summed(endpoint)
        return load

    def _summed(self, endpoint: str) -> Load:
        report = self._reports.get(endpoint)
        if report is None:
            ours = self._ours.get(endpoint, _Ours())
            return Load(len(ours.flights), 0, ours.queued_tokens, kv_usage=0.0, reported=False)
        unreported = [flight for same_id in self._unreported.get(endpoint, {}).values() for flight in same_id]
        return Load(
            running=report.running + len(unreported),
            waiting=report.waiting,
            queued_tokens=report.queued_tokens + sum(flight.uncached_tokens for flight in unreported),
            kv_usage=report.kv_usage,
            unreported=len(unreported),
            engines=max(1, report.engines),
        )
