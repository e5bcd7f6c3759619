"""Whether an endpoint should be given another request now, and how much work it is given ahead: learned. Pure.

An engine needs work in hand for the time between two of its passes and our answer to its report; whatever it has beyond
that only waits there, where it can no longer be placed elsewhere or overtaken.
"""

from dataclasses import dataclass

from mini_infer_gateway.fleet.load import Load
from mini_infer_gateway.fleet.placement_pauses import lacks_pages

FIRST_WINDOW_S, SHORTEST_WINDOW_S, LONGEST_WINDOW_S = 0.4, 0.1, 2.0
WIDER, NARROWER = 1.25, 0.995


def has_room(load: Load, tokens_per_s: float, window_s: float) -> bool:
    """Whether its queue is shorter than the window, and nothing waits there for pages.

    An endpoint that does not report is given everything: nobody could tell when it has room again.
    """
    if not load.reported:
        return True
    return not lacks_pages(load) and load.queued_tokens < window_s * tokens_per_s


@dataclass(slots=True)
class Window:
    """Seconds of prompt work that one endpoint is given ahead."""

    seconds: float = FIRST_WINDOW_S

    def learn(self, queued_tokens: int, waiting_here: int) -> None:
        """A load report came: wider where the endpoint ran dry although something waited for it, else narrower."""
        if waiting_here and not queued_tokens:
            self.seconds = min(LONGEST_WINDOW_S, self.seconds * WIDER)
        elif waiting_here:
            self.seconds = max(SHORTEST_WINDOW_S, self.seconds * NARROWER)
