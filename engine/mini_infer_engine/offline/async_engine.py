"""Connects an engine's thread to the tasks of an event loop that wait for its outputs."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

from mini_infer_engine.core.request import Output
from mini_infer_engine.offline.engine_thread import EngineThread
from mini_infer_engine.offline.loaded_model import LoadedModel
from mini_infer_engine.offline.pending import PendingRequest, RequestsInFlight

Result = TypeVar("Result")


class EngineDeadError(RuntimeError):
    """Raised when the engine has ended, or was shut down: what it computed is lost, and it takes nothing more."""


class AsyncEngine:
    """A model's engine on a thread of its own. All methods but `stop` are called on one event loop."""

    def __init__(self, model: LoadedModel) -> None:
        """Starts the thread."""
        self.error: EngineDeadError | None = None
        """The reason why the engine has ended; None while it runs."""
        self._in_flight = RequestsInFlight(model.text.decoder)
        self._changed: dict[PendingRequest, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(model.engine, self._deliver, self._lost)

    @contextmanager
    def running(self, pending: PendingRequest) -> Iterator[Callable[[], Awaitable[None]]]:
        """Runs a request inside the `with` block, and aborts what is left of it at its end.

        Yields a function that waits until outputs were added to the request. It raises ValueError if the engine
        refuses the request, RuntimeError if a pass failed, and EngineDeadError if the engine has ended.
        """
        self._use_this_loop()
        if self.error is not None:
            raise self.error
        self._in_flight.add(pending)
        changed = self._changed[pending] = asyncio.Event()
        for request in pending.requests:
            if request.leads:
                self._thread.add(request)

        async def wait() -> None:
            await changed.wait()
            changed.clear()
            if (error := self.error or pending.error) is not None:
                raise error

        try:
            yield wait
        finally:
            del self._changed[pending]
            self._thread.abort(self._in_flight.remove(pending))

    def abort(self, pending: PendingRequest) -> None:
        """Ends a request with the finish reason "abort"."""
        left = self._in_flight.left_of(pending)
        self._thread.abort(left)
        self._take([Output(request_id=one, token_ids=[], finish_reason="abort") for one in left])

    async def between_steps(self, function: Callable[[], Result]) -> Result:
        """Calls a function on the engine's thread between two steps. Raises EngineDeadError if it has ended."""
        if self.error is not None:
            raise self.error
        future: Future[Result] = self._thread.call(function)
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Ends the thread after the current step; requests that run then never end. May be called by any thread."""
        self._thread.stop()

    def shut_down(self) -> None:
        """Ends the engine and waits for that; tasks that wait for outputs get an EngineDeadError."""
        self._thread.stop()
        self._thread.join()
        self._lost(EngineDeadError("the engine was shut down"))

    def _use_this_loop(self) -> None:
        """Raises RuntimeError if requests of another event loop run."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop and self._changed:
            raise RuntimeError("requests of another event loop are in flight: use one loop for each AsyncLLM")
        self._loop = loop

    def _deliver(self, outputs: list[Output]) -> None:
        """Takes a step's outputs, on the engine's thread."""
        self._on_loop(lambda: self._take(outputs))

    def _lost(self, error: Exception) -> None:
        """Takes the engine's end, on any thread."""
        if self.error is None:
            self.error = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
            self._on_loop(self._wake_all)

    def _on_loop(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed, its tasks are gone, and their requests were aborted.
                self._loop.call_soon_threadsafe(function)

    def _take(self, outputs: list[Output]) -> None:
        changed, to_abort = self._in_flight.take(outputs)
        if to_abort:
            self._thread.abort(to_abort)
        for pending in changed:
            if (event := self._changed.get(pending)) is not None:
                event.set()

    def _wake_all(self) -> None:
        for event in self._changed.values():
            event.set()
