"""Chooses which client's request goes next, by virtual token counters, one for each API key. Pure.

The rule is that of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): a counter grows by the tokens
that a client was served, divided by its weight, and the waiting client with the lowest counter goes first. A client
that returns begins at the virtual time, as in start-time fair queueing (Goyal et al., SIGCOMM 1996), so that idle time
is not saved.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

TOKENS_PER_SECOND: Final = 32.0
"""Tokens charged for a second in an engine's batch: about as many are decoded; the gateway does not count them."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The requests that share one counter: those of one API key, or of one name in the file of keys."""

    name: str = ""
    """Name of the key; empty for all clients of a server without keys."""
    weight: float = 1.0


NO_KEY: Final = Flow()


class FairShares:
    """The counters of all flows."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self.virtual_time = 0.0

    def level(self, flow: Flow) -> float:
        """Returns the tokens served per weight: the lowest goes first."""
        return self._served.get(flow.name, 0.0)

    def join(self, flow: Flow) -> None:
        """Raises the counter of a flow that has a request now, and had none waiting, to the virtual time."""
        self._served[flow.name] = max(self.level(flow), self.virtual_time)

    def dispatch(self, flow: Flow, tokens: float, waiting: Iterable[Flow]) -> None:
        """Counts a request of the flow as served; `waiting` are the flows that have others."""
        lowest = own = self.level(flow)
        for other in waiting:
            lowest = min(lowest, self.level(other))
        if lowest > self.virtual_time:
            self.virtual_time = lowest
        self._served[flow.name] = own + tokens / flow.weight

    def charge(self, flow: Flow, tokens: float) -> None:
        """Counts tokens that the flow was served."""
        self._served[flow.name] = self.level(flow) + tokens / flow.weight

    def keep(self, flows: Iterable[Flow]) -> None:
        """Forgets counters that have no effect: those not above the virtual time, except of `flows`."""
        kept = {flow.name for flow in flows}
        self._served = {
            name: served for name, served in self._served.items() if name in kept or served > self.virtual_time
        }
