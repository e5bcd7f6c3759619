"""A function in a process of its own: the GPU's memory is free again afterwards, and a crash is a result.

It yields its figures part by part, and makes the next part only when it is asked for it: several that hold a GPU
together are measured in turns.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Self

from common.report import log_line

Figures = dict[str, Any]


class IsolationError(Exception):
    """The process failed, died or took too long."""


class Isolated:
    """A function's process; a context manager, which ends it with all its children."""

    def __init__(self, function: Callable[..., Iterator[Figures]], *arguments: Any) -> None:
        """Start it: it imports what it needs, and waits. The function must be importable by name."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, function, arguments))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Killed, not asked to leave: it has said all, and a peer's core that outlives it would keep the GPU's memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it was started
        self._process.kill()
        self._process.join()

    def start_step(self) -> None:
        """Have it make the next part."""
        with contextlib.suppress(BrokenPipeError):  # the answer tells
            self._connection.send(None)

    def answers(self, timeout_s: float) -> Iterator[Figures]:
        """The part that was asked for and those after it, all of which come in time.

        IsolationError: or why they do not.
        """
        end = time.monotonic() + timeout_s
        while True:
            try:
                if not self._connection.poll(max(0.0, end - time.monotonic())):
                    raise IsolationError(f"took longer than {timeout_s:.0f} s")
                part: Figures | IsolationError | None = self._connection.recv()
            except (EOFError, ConnectionResetError):
                raise IsolationError("the process died without a word") from None
            if isinstance(part, IsolationError):
                raise part
            if part is None:
                return
            yield part
            self.start_step()

    def parts(self, timeout_s: float) -> Iterator[Figures]:
        """Ask, and all answers."""
        self.start_step()
        yield from self.answers(timeout_s)


def isolated(
    function: Callable[..., Iterator[Figures]],
    *arguments: Any,
    timeout_s: float = 900,
    note: Callable[[Figures], None] = lambda figures: None,
) -> Figures:
    """All that `function` yields, in one; "error" beside it if it fails, dies or takes too long.

    `note` is told each part at once.
    """
    found: Figures = {}
    with Isolated(function, *arguments) as process:
        try:
            for part in process.parts(timeout_s):
                found |= part
                note(part)
        except IsolationError as error:
            log_line(f"  failed: {error}")
            found["error"] = str(error)
    return found


def _run(connection: Connection, function: Callable[..., Iterator[Figures]], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    try:
        parts = function(*arguments)
        part: Figures | None = {}
        while part is not None:
            connection.recv()
            part = next(parts, None)
            connection.send(part)
    except EOFError:
        return  # nobody asks any more
    except Exception as error:
        traceback.print_exc()
        connection.send(IsolationError(f"{type(error).__name__}: {error}"[:500]))
