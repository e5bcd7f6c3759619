"""How busy each endpoint is: its own last report, plus those of our requests that the report cannot contain yet.

Reports name the requests that arrived since the one before; those are dropped here, so that all gateway replicas end at
the same number. An endpoint that never reported is judged by what we have in flight there. Pure: no clock, no socket.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mini_infer_contract.events import LoadReport


class Load(NamedTuple):
    """What an endpoint has to do."""

    running: int
    waiting: int
    queued_tokens: int
    kv_usage: float
    unreported: int = 0
    """Of the running ones, those of ours that no report has counted yet."""
    reported: bool = True
    """The endpoint tells how busy it is; else this is what we have in flight there, answers that do not stream included
    until they are whole."""
    engines: int = 1
    """Copies of the model behind the endpoint, with a queue each."""


@dataclass(slots=True, eq=False)
class InFlight:
    """One request that we sent: give it back with `finish`."""

    endpoint: str
    request_id: str
    uncached_tokens: int
    answered: bool = False
    """Its first byte came, so its prompt is computed."""


@dataclass(slots=True)
class _Ours:
    """Our own requests at one endpoint."""

    flights: set[InFlight] = field(default_factory=set)
    queued_tokens: int = 0
    """Uncached ones of those whose first byte has not come."""

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
    """Reports and requests in flight of all endpoints."""

    def __init__(self) -> None:
        self._reports: dict[str, LoadReport] = {}
        self._ours: dict[str, _Ours] = {}
        self._loads: dict[str, Load] = {}
        """What `load` has worked out and nothing has changed since."""
        self._unreported: dict[str, dict[str, list[InFlight]]] = {}
        """Endpoint -> request id -> requests, as many as a client sent under one id."""
        self.on_report: Callable[[str, LoadReport], None] = lambda endpoint, report: None
        """Called after a report was taken."""

    def start(self, endpoint: str, request_id: str, uncached_tokens: int) -> InFlight:
        """Counts a request from the decision on, before the endpoint can know of it."""
        flight = InFlight(endpoint, request_id, uncached_tokens)
        self._ours.setdefault(endpoint, _Ours()).add(flight)
        self._unreported.setdefault(endpoint, {}).setdefault(request_id, []).append(flight)
        self._loads.pop(endpoint, None)
        return flight

    def answered(self, flight: InFlight) -> None:
        """Its first byte came: its prompt is computed."""
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
        """Takes an endpoint's own word."""
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
        """The endpoint's reports stopped coming (its socket is gone): its last one means nothing any more."""
        self._loads.pop(endpoint, None)
        self._reports.pop(endpoint, None)

    def forget(self, endpoint: str) -> None:
        """The endpoint is gone; requests still in flight there end by themselves."""
        self._loads.pop(endpoint, None)
        self._reports.pop(endpoint, None)
        self._ours.pop(endpoint, None)
        self._unreported.pop(endpoint, None)

    def in_flight(self, endpoint: str) -> int:
        """Our own requests there."""
        ours = self._ours.get(endpoint)
        return len(ours.flights) if ours else 0

    def load(self, endpoint: str) -> Load:
        """What is known now."""
        return self._loads.get(endpoint) or self._worked_out(endpoint)

    def loads(self, endpoints: Sequence[str]) -> list[Load]:
        """The same of several."""
        known, work_out = self._loads.get, self._worked_out
        return [known(endpoint) or work_out(endpoint) for endpoint in endpoints]

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
