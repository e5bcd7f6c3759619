"""Steps an engine on a thread of its own: requests and calls go in, outputs of steps come out. Knows no event loop."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from mini_infer_engine.core.request import Output, Request

Result = TypeVar("Result")


class Engine(Protocol):
    """An engine that is stepped."""

    @property
    def has_work(self) -> bool:
        """True if a step may return outputs."""

    def add(self, request: Request) -> None:
        """Adds a request. Raises ValueError if it is refused."""

    def abort(self, request_id: str) -> None:
        """Aborts a request. Unknown ids are ignored."""

    def step(self) -> list[Output]:
        """Computes one step."""


class EngineThread:
    """Owns an engine's thread. All methods may be called from any other thread."""

    def __init__(
        self, engine: Engine, deliver: Callable[[list[Output]], None], lost: Callable[[Exception], None]
    ) -> None:
        """Starts the thread, on which both functions are called: with each step's outputs, and with the error that
        ended the engine.
        """
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(engine, self._calls, deliver, lost), name="engine", daemon=True
        )
        self._engine, self._deliver = engine, deliver
        self._thread.start()

    def add(self, request: Request) -> None:
        """Adds a request between two steps. One that the engine refuses ends with an error that says why."""

        def add() -> None:
            try:
                self._engine.add(request)
            except ValueError as error:
                refusal = Output(
                    request_id=request.request_id,
                    token_ids=[],
                    finish_reason="error",
                    error=str(error),
                    is_refusal=True,
                )
                self._deliver([refusal])

        self._calls.put(add)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Aborts requests between two steps."""

        def abort() -> None:
            for request_id in request_ids:
                self._engine.abort(request_id)

        self._calls.put(abort)

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Calls a function between two steps, and returns the future of its result."""
        future: Future[Result] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._calls.put(call)
        return future

    def stop(self) -> None:
        """Ends the thread after the current step."""
        self._calls.put(None)

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()


def _run(
    engine: Engine,
    calls: "SimpleQueue[Callable[[], None] | None]",
    deliver: Callable[[list[Output]], None],
    lost: Callable[[Exception], None],
) -> None:
    try:
        while True:
            for call in _waiting(calls, wait=not engine.has_work):
                if call is None:
                    return
                call()
            if engine.has_work and (outputs := engine.step()):
                deliver(outputs)
    except Exception as error:
        lost(error)


def _waiting(calls: "SimpleQueue[Callable[[], None] | None]", *, wait: bool) -> list[Callable[[], None] | None]:
    """Returns all calls that wait; waits for one if `wait`."""
    found = [calls.get()] if wait else []
    try:
        while True:
            found.append(calls.get_nowait())
    except Empty:
        return found
