"""Learns how long an endpoint without free pages or slots takes until it can accept one more request. Pure.

Prompt tokens do not predict that: a request ends when its answer does. The pauses between the latest placements do.
"""

from collections.abc import Collection
from dataclasses import dataclass

from mini_infer_gateway.fleet.load import Load

GAIN = 0.2
"""Weight of the latest pause: about the last five count, since a batch of long answers ends within a few of them."""
WAITING_LIMIT = 2
"""Largest number of requests that wait for pages or slots at an engine: one to take the next place, and one spare. An
endpoint may have several engines.
"""
FULL_KV_USAGE = 0.95


def lacks_pages(load: Load) -> bool:
    """True if as many requests wait for pages or slots at the endpoint as the limit allows."""
    if not load.reported:
        return False
    # What a report does not count yet joins those that wait, where pages or slots are what is missing.
    waiting = load.waiting + (load.unreported if load.waiting or load.kv_usage > FULL_KV_USAGE else 0)
    return waiting >= WAITING_LIMIT * load.engines


@dataclass(slots=True)
class _Pause:
    since_s: float | None = None
    """Time when the latest request was placed, or the first began to wait; None if nothing waits."""
    mean_s: float = 0.0


class PlacementPauses:
    """The pauses of all endpoints."""

    def __init__(self) -> None:
        self._pauses: dict[str, _Pause] = {}

    def began(self, endpoint: str, now_s: float) -> None:
        """Records that a request waits for this endpoint from now on."""
        pause = self._pauses.setdefault(endpoint, _Pause())
        if pause.since_s is None:
            pause.since_s = now_s

    def placed(self, endpoint: str, now_s: float, still_waiting: bool) -> None:
        """Records that a request was sent to this endpoint. `still_waiting` is True if others wait for it."""
        pause = self._pauses.get(endpoint)
        if pause is None or pause.since_s is None:
            return
        took_s = now_s - pause.since_s
        pause.mean_s = pause.mean_s + GAIN * (took_s - pause.mean_s) if pause.mean_s else took_s
        pause.since_s = now_s if still_waiting else None

    def left(self, endpoint: str) -> None:
        """Records that nothing waits for this endpoint any more."""
        if pause := self._pauses.get(endpoint):
            pause.since_s = None

    def seconds(self, endpoint: str, now_s: float) -> float:
        """Returns the mean pause, or the current one if that is already longer."""
        pause = self._pauses.get(endpoint)
        if pause is None:
            return 0.0
        return pause.mean_s if pause.since_s is None else max(pause.mean_s, now_s - pause.since_s)

    def keep(self, endpoints: Collection[str]) -> None:
        """Forgets all other endpoints."""
        if self._pauses.keys() - endpoints:
            self._pauses = {name: pause for name, pause in self._pauses.items() if name in endpoints}
