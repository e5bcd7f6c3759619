"""Runs the checks of one client, in that client's own environment: nothing of the project can be imported here.

A check is a function that raises where it does not see what expected.yaml says. One JSON line each goes to stdout.
"""

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ["CONFORMANCE_URL"]
"""Of the gateway, without a path."""
DEMO = "demo"
SCRIPTED = "scripted"
QUESTION = "What does os.path.join do?"
"""The demo model knows the answer."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "weather", "parameters": WEATHER},
}

_checks: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register it by its name."""
    _checks[function.__name__] = function
    return function


def raises(kind: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> Any:
    """The error that the call raises; AssertionError where it raises none."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")


def main() -> None:
    """Run those named on the command line, else all."""
    for name, function in _checks.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        start = time.monotonic()
        try:
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
            line = {"check": name, "ok": True}
        except BaseException as error:
            trace = traceback.extract_tb(error.__traceback__)
            where = next((f.lineno for f in reversed(trace) if f.filename == sys.modules["__main__"].__file__), None)
            line = {"check": name, "ok": False, "saw": f"line {where}: {type(error).__name__}: {error}"[:600]}
        print(json.dumps(line | {"seconds": round(time.monotonic() - start, 2)}), flush=True)


async def _awaited(result: Any) -> Any:
    return await asyncio.wait_for(result, 60)
