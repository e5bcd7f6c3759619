"""A function in a process of its own: the GPU's memory is free again afterwards, and a crash is a result."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from common.report import say


def isolated(function: Callable[..., dict[str, Any]], *arguments: Any, timeout_s: float = 900) -> dict[str, Any]:
    """What `function` returns; {"error": ...} if it fails, dies or takes too long. It must be importable by name."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sending, function, arguments))
    process.start()
    sending.close()
    try:
        if not receiving.poll(timeout_s):
            return {"error": f"took longer than {timeout_s:.0f} s"}
        result: dict[str, Any] = receiving.recv()
    except EOFError:
        result = {"error": "the process died without a word"}
    finally:
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()
    if "error" in result:
        say(f"  failed: {result['error']}")
    return result


def _run(sending: Connection, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    sending.send(result)
    sending.close()
