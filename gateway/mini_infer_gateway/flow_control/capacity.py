"""Decides whether an endpoint has room for another request, and learns how much work it needs in advance. Pure.

An engine needs queued work for the time between two of its passes and our reaction to its report. Whatever it has
beyond that only waits there, where it can no longer be placed elsewhere or overtaken.
"""

from dataclasses import dataclass

from mini_infer_gateway.fleet.load import Load
from mini_infer_gateway.fleet.placement_pauses import lacks_pages

FIRST_WINDOW_S, SHORTEST_WINDOW_S, LONGEST_WINDOW_S = 0.4, 0.1, 2.0
WIDER, NARROWER = 1.25, 0.995


def has_capacity(load: Load, tokens_per_s: float, window_s: float) -> bool:
    """True if the endpoint's queue is shorter than the window, and no request there waits for pages.

    An endpoint that does not report its load gets everything: nothing would show when it has room again.
    """
    if not load.reported:
        return True
    return not lacks_pages(load) and load.queued_tokens < window_s * tokens_per_s


@dataclass(slots=True)
class Window:
    """The window of one endpoint: the seconds of prompt work that it gets in advance."""

    seconds: float = FIRST_WINDOW_S

    def learn(self, queued_tokens: int, waiting_here: int) -> None:
        """Adapts to a load report: widens if the endpoint ran dry while requests waited for it, else narrows."""
        if waiting_here and not queued_tokens:
            self.seconds = min(LONGEST_WINDOW_S, self.seconds * WIDER)
        elif waiting_here:
            self.seconds = max(SHORTEST_WINDOW_S, self.seconds * NARROWER)
