"""Records what one attempt teaches about its endpoint: waiting requests, first bytes, failures, room. Knows no HTTP.

If the endpoint is removed meanwhile, its record has no effect: nothing reads that state any more.
"""

import logging
from collections.abc import Callable

from mini_infer_gateway.fleet.breaker import Cause
from mini_infer_gateway.fleet.endpoint_state import EndpointState, Waiting

DRAIN_PAUSE_S = 2.0
"""Seconds for which an endpoint is not chosen after it reported that it drains, until its source reports so too."""
UNANSWERED_PROBE_S = 0.5
"""Seconds without a byte after which a request to an ejected endpoint counts as failed, whoever ended it."""

log = logging.getLogger(__name__)


class AttemptRecord:
    """The record of one attempt: created when a request is sent; one of the verdicts, or `close` alone, ends it."""

    def __init__(self, state: EndpointState, request: Waiting, clock: Callable[[], float]) -> None:
        self._state, self._request, self._clock = state, request, clock
        self._generation = state.breaker.started()
        self.started_s = clock()
        self.judged = self._streams = False
        state.sent(request, self.started_s)

    def byte(self) -> None:
        """Records that a part of the answer arrived."""
        self._state.received_byte(self._clock())
        if not self._streams and self._request.can_resume:
            self._streams = True
            self._state.streaming.add(self._request)

    def first_byte(self, status: int) -> None:
        """Records that the answer begins."""
        now_s = self._clock()
        self._state.received_byte(now_s)
        self._state.waits_no_more(self._request, now_s)
        if status < 400:
            self._state.answers(now_s, now_s - self.started_s)
        if status < 500:
            self._unless_closed("answers again", lambda: self._state.breaker.first_byte(self._generation))

    def succeeded(self) -> None:
        """Records a complete answer that is no server error."""
        self.judged = True
        self._unless_closed("answers again", lambda: self._state.breaker.succeeded(self._generation))

    def failed(self, cause: Cause) -> None:
        """Records a connect error, a 5xx, a time-out or a stream that broke."""
        self.judged = True
        state = self._state
        was_closed = state.breaker.closed
        state.breaker.failed(self._generation, self._clock(), cause)
        if cause is Cause.UNREACHABLE:
            state.subscriber.suspect()
        if was_closed and not state.breaker.closed:
            log.warning("endpoint %s failed several times (%s), leaving it alone", state.endpoint.name, cause.value)

    def draining(self) -> None:
        """Records that the endpoint answered that it drains."""
        self._state.draining_until_s = self._clock() + DRAIN_PAUSE_S

    def overloaded(self, retry_after_s: float | None) -> None:
        """Records that the endpoint answered 429."""
        self._state.overloaded(self._clock(), retry_after_s)

    def close(self) -> None:
        """Ends the attempt; if it has no verdict yet, the breaker learns that it ended."""
        now_s, state = self._clock(), self._state
        is_unanswered = self._request in state.waiting
        if is_unanswered:
            state.waits_no_more(self._request, now_s)
        state.streaming.discard(self._request)
        del self._request  # It refers back to this record, and would leave a reference cycle.
        if self.judged:
            return
        if is_unanswered and not state.breaker.closed and now_s - self.started_s > UNANSWERED_PROBE_S:
            state.breaker.failed(self._generation, now_s, Cause.SLOW)
        else:
            state.breaker.ended(self._generation)

    def _unless_closed(self, event: str, verdict: Callable[[], None]) -> None:
        was_closed = self._state.breaker.closed
        verdict()
        if not was_closed and self._state.breaker.closed:
            log.info("endpoint %s %s", self._state.endpoint.name, event)
