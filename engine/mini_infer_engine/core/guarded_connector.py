"""Calls the KV connector on behalf of the engine, and survives whatever the connector raises.

A fault fails only the transfer that it concerns: a prompt that was to come from another engine is computed here, and
another engine that waits gets a refusal. Without a connector every call is a no-op. It knows neither pages nor sockets.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from mini_infer_engine.core.faults import FaultLog
from mini_infer_engine.core.kv_transfer import (
    NO_TRANSFERS,
    KVConnector,
    KVTransferStats,
    LayerProgress,
    NotReceived,
    Received,
    Work,
)
from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.core.sequence import Sequence

Result = TypeVar("Result")

FAULT = "fault"
"""The reason of a fall-back that an exception has caused."""


class GuardedConnector:
    """Has the methods of `KVConnector`, none of which raises."""

    def __init__(self, connector: KVConnector | None) -> None:
        """`connector` is None where the engine exchanges no keys and values."""
        self.connector = connector
        self._faults = FaultLog()
        self._receiving: set[str] = set()
        """Ids of requests for which `take` owes a result."""
        self._came: list[Received | NotReceived] = []
        """Results that the next `take` returns in addition to the connector's."""
        self._receives = True
        """False after a `take` that has raised, so that it is not called again at once for results that it did not
        return.
        """
        self._stats = NO_TRANSFERS

    @property
    def is_present(self) -> bool:
        """False if the engine exchanges no keys and values; then nothing here need be called in a step."""
        return self.connector is not None

    @property
    def falls_back(self) -> bool:
        """True if a prompt that does not come is computed here."""
        connector = self.connector
        return connector is None or self._call("falls_back", lambda: connector.falls_back, otherwise=True)

    def refuses(self, request: Request) -> str:
        """Returns why a request's keys and values are computed here, or an empty string if they may come. A
        request that is refused is counted as skipped.
        """
        if (connector := self.connector) is None:
            return "no_transfer"
        reason = self._call("refuses", lambda: connector.refuses(request), FAULT)
        if reason:
            self.skip(reason)
        return reason

    def skip(self, reason: str) -> None:
        """Counts a sequence that is computed here instead."""
        if (connector := self.connector) is not None:
            self._runs("skip", lambda: connector.skip(reason))

    def receive(self, sequence: Sequence) -> None:
        """Requests a sequence's keys and values. If that fails, the next `take` reports it."""
        if (connector := self.connector) is None:
            return
        request_id = sequence.request.request_id
        self._receiving.add(request_id)
        if not self._runs("receive", lambda: connector.receive(sequence)):
            self._came.append(_fault_of(request_id))

    def cancel(self, sequence: Sequence) -> None:
        """Cancels the transfer of a sequence's keys and values to this engine."""
        self._receiving.discard(sequence.request.request_id)
        if (connector := self.connector) is not None:
            self._runs("cancel", lambda: connector.cancel(sequence))

    def has_news(self, now_s: float) -> bool:
        """True if `take` has something to return."""
        if (connector := self.connector) is None:
            return False
        has_news = self._receives and self._call("has_news", lambda: connector.has_news(now_s), otherwise=False)
        return has_news or bool(self._came)

    def take(self, now_s: float, prefill_tokens_per_s: float) -> Work:
        """Returns what has happened since the last call. If the connector raises, all awaited transfers fail."""
        if (connector := self.connector) is None:
            return Work()
        work = self._call("take", lambda: connector.take(now_s, prefill_tokens_per_s), None)
        self._receives = work is not None
        if work is None:
            work = Work(came=[_fault_of(request_id) for request_id in sorted(self._receiving)])
        work.came.extend(self._came)
        self._came = []
        self._receiving.difference_update(event.request_id for event in work.came)
        return work

    def sends(self, sequence: Sequence) -> bool:
        """Returns True if another engine waits for a sequence's keys and values."""
        connector = self.connector
        return connector is not None and self._call("gives", lambda: connector.sends(sequence), otherwise=False)

    def launched(self, sequence: Sequence, num_tokens: int, layers: LayerProgress) -> None:
        """Reports that a pass which computes a sequence's first `num_tokens` tokens has begun."""
        if (connector := self.connector) is not None and not self._runs(
            "launched", lambda: connector.launched(sequence, num_tokens, layers)
        ):
            self._refuse(sequence)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Reports that a sequence's first `num_tokens` tokens have been computed."""
        if (connector := self.connector) is not None and not self._runs(
            "computed", lambda: connector.computed(sequence, num_tokens)
        ):
            self._refuse(sequence)

    def _refuse(self, sequence: Sequence) -> None:
        if self.sends(sequence):
            self.accept_failed(sequence.request.request_id, "what was computed could not be handed over")

    def accept_failed(self, request_id: str, message: str) -> None:
        """Reports that a request of another engine cannot be served."""
        if (connector := self.connector) is not None:
            self._runs("accept_failed", lambda: connector.accept_failed(request_id, message))

    def divert(self, outputs: list[Output]) -> list[Output]:
        """Returns the outputs of this engine's own requests."""
        connector = self.connector
        return outputs if connector is None else self._call("divert", lambda: connector.divert(outputs), outputs)

    def drop(self, request_id: str) -> None:
        """Reports that a request whose keys and values were to be retained was aborted."""
        if (connector := self.connector) is not None:
            self._runs("drop", lambda: connector.drop(request_id))

    @property
    def stats(self) -> KVTransferStats:
        """The connector's counters, including the faults that were caught here."""
        if (connector := self.connector) is None:
            return NO_TRANSFERS
        self._stats = self._call("stats", lambda: connector.stats, self._stats)
        if not (own := self._faults.num_faults):
            return self._stats
        return replace(self._stats, faults=self._stats.faults + own)

    def record(self, place: str, error: BaseException) -> None:
        """Counts and logs a fault in the engine's handling of one transfer."""
        self._faults.record(place, error)

    def _runs(self, name: str, procedure: Callable[[], None]) -> bool:
        """Returns True if a procedure of the connector has not raised."""
        try:
            procedure()
        except Exception as error:
            self._faults.record(f"{name} of the connector", error)
            return False
        return True

    def _call(self, name: str, function: Callable[[], Result], otherwise: Result) -> Result:
        try:
            return function()
        except Exception as error:
            self._faults.record(f"{name} of the connector", error)
            return otherwise


def _fault_of(request_id: str) -> NotReceived:
    return NotReceived(request_id, FAULT, "this engine's KV transfer has a fault; its log says which")
