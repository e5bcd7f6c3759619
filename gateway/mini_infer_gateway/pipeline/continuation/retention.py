"""Decides if the body of a stream is retained for its continuation, and warns if there is no memory for that."""

import logging
from collections.abc import Callable

from mini_infer_gateway.memory import BodyBudget
from mini_infer_gateway.metrics import Metrics
from mini_infer_gateway.pipeline.continuation.base import Continuation

WARN_EVERY_S = 60.0
"""Seconds between two warnings that streams cannot be continued."""

log = logging.getLogger(__name__)


class BodyRetention:
    """The decisions of one gateway, with the time of its last warning."""

    def __init__(self, bodies: BodyBudget, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._bodies, self._metrics, self._clock = bodies, metrics, clock
        self._warn_again_s = 0.0

    def allows(self, continuation: Continuation) -> bool:
        """Returns False if memory is too short; a stream that could be continued is counted then."""
        if not self._bodies.is_tight:
            return True
        if continuation.possible:
            self._metrics.continuation_off()
            if self._clock() >= self._warn_again_s:
                self._warn_again_s = self._clock() + WARN_EVERY_S
                log.warning(
                    "streams that begin now are not continued should their endpoint die: bodies take more than half of "
                    "their share of --memory-limit; raise it"
                )
        return False
