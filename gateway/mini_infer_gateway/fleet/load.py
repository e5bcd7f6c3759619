"""How busy each endpoint is: its own last report, plus those of our requests that the report cannot contain yet.

Reports name the requests that arrived since the one before; those are dropped here, so that all gateway replicas end at
the same number. An endpoint that never reported is judged by what we have in flight there. Pure: no clock, no socket.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


class LoadLedger:
    """Reports and requests in flight of all endpoints."""

    def __init__(self) -> None:
        self._reports: dict[str, LoadReport] = {}
        self._in_flight: dict[str, set[InFlight]] = {}
        self._loads: dict[str, Load] = {}
        """What `load` has worked out and nothing has changed since."""
        self._unreported: dict[str, dict[str, list[InFlight]]] = {}
        """Endpoint -> request id -> requests, as many as a client sent under one id."""
        self.on_report: Callable[[str, LoadReport], None] = lambda endpoint, report: None
        """Called after a report was taken."""

    def start(self, endpoint: str, request_id: str, uncached_tokens: int) -> InFlight:
        """Counts a request from the decision on, before the endpoint can know of it."""
        flight = InFlight(endpoint, request_id, uncached_tokens)
        self._in_flight.setdefault(endpoint, set()).add(flight)
        self._unreported.setdefault(endpoint, {}).setdefault(request_id, []).append(flight)
        self._loads.pop(endpoint, None)
        return flight

    def answered(self, flight: InFlight) -> None:
        """Its first byte came: its prompt is computed."""
        flight.answered = True
        self._loads.pop(flight.endpoint, None)

    def finish(self, flight: InFlight) -> None:
        """Forgets a request that ended, however it ended."""
        self._loads.pop(flight.endpoint, None)
        self._in_flight.get(flight.endpoint, set()).discard(flight)
        unreported = self._unreported.get(flight.endpoint, {})
        same_id = unreported.get(flight.request_id, [])
        if flight in same_id:
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
        self._in_flight.pop(endpoint, None)
        self._unreported.pop(endpoint, None)

    def in_flight(self, endpoint: str) -> int:
        """Our own requests there."""
        return len(self._in_flight.get(endpoint, ()))

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
            flights = self._in_flight.get(endpoint, set())
            queued = sum(flight.uncached_tokens for flight in flights if not flight.answered)
            return Load(running=len(flights), waiting=0, queued_tokens=queued, kv_usage=0.0, reported=False)
        unreported = [flight for same_id in self._unreported.get(endpoint, {}).values() for flight in same_id]
        return Load(
            running=report.running + len(unreported),
            waiting=report.waiting,
            queued_tokens=report.queued_tokens + sum(flight.uncached_tokens for flight in unreported),
            kv_usage=report.kv_usage,
            unreported=len(unreported),
            engines=max(1, report.engines),
        )
