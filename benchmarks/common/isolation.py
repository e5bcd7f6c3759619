"""A function in a process of its own: the GPU's memory is free again afterwards, and a crash is a result."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from common.report import say

Figures = dict[str, Any]


def isolated(
    function: Callable[..., Iterator[Figures]],
    *arguments: Any,
    timeout_s: float = 900,
    note: Callable[[Figures], None] = lambda figures: None,
) -> Figures:
    """All that `function` yields, in one; "error" beside it if it fails, dies or takes too long.

    `note` is told each part at once. The function must be importable by name.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sending, function, arguments))
    process.start()
    sending.close()
    end = time.monotonic() + timeout_s
    found: Figures = {}
    try:
        while receiving.poll(max(0.0, end - time.monotonic())):
            part = receiving.recv()
            if part is None:
                break
            found |= part
            if "error" not in part:
                note(part)
        else:
            found["error"] = f"took longer than {timeout_s:.0f} s"
    except EOFError:
        found["error"] = "the process died without a word"
    finally:
        # Killed, not asked to leave: it has said all, and a peer's core that outlives it would keep the GPU's memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it was started
        process.kill()
        process.join()
    if "error" in found:
        say(f"  failed: {found['error']}")
    return found


def _run(sending: Connection, function: Callable[..., Iterator[Figures]], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    try:
        for part in function(*arguments):
            sending.send(part)
        sending.send(None)
    except Exception as error:
        traceback.print_exc()
        sending.send({"error": f"{type(error).__name__}: {error}"[:500]})
        sending.send(None)
    sending.close()
