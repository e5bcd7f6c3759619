"""Runs requests on a model's engine, a step at a time. Knows no parameters as callers write them."""

from collections.abc import Iterable

from mini_infer_engine.offline.loaded_model import LoadedModel
from mini_infer_engine.offline.pending import PendingRequest, RequestsInFlight


class SteppedEngine:
    """A model's engine and the requests that it works on. Not thread-safe."""

    def __init__(self, model: LoadedModel) -> None:
        self._engine = model.engine
        self._in_flight = RequestsInFlight(model.text.decoder)

    def __len__(self) -> int:
        """Returns the number of texts and embeddings to come."""
        return len(self._in_flight)

    def submit(self, pending: PendingRequest) -> None:
        """Adds a request. Raises ValueError if the engine refuses it, or its id is in use."""
        self._in_flight.add(pending)
        try:
            for request in pending.requests:
                if request.leads:
                    self._engine.add(request)
        except BaseException:
            self.abort([pending])
            raise

    def advance(self) -> list[PendingRequest]:
        """Computes one step, and returns the requests that it adds to.

        Raises RunnerLostError if the engine has ended. When the last request has ended, the engine is idle.
        """
        changed, to_abort = self._in_flight.take(self._engine.step())
        for request_id in to_abort:
            self._engine.abort(request_id)
        if not len(self._in_flight):
            while self._engine.has_work:
                self._engine.step()
        return changed

    def abort(self, requests: Iterable[PendingRequest]) -> None:
        """Aborts what is left of requests."""
        for pending in requests:
            for request_id in self._in_flight.remove(pending):
                self._engine.abort(request_id)
