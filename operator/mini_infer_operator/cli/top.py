"""Runs `mini-infer top`: follows the events of a gateway's console, and shows them in the terminal."""

import http.client
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.live import Live

from mini_infer_operator.cli.server_access import ServerError, base_url, found_server, open_server
from mini_infer_operator.cli.top_views import MAX_REQUESTS, screen

EVENTS_PATH = "/console/api/events"
SILENCE_S = 30.0
"""Seconds without an event after which the gateway counts as gone: it sends one every two."""
RETRY_PAUSE_S = 1.0
MAX_SAMPLES = 60
"""Samples of each engine that are kept for its line of bars."""


def top(url: str | None, *, once: bool) -> int:
    """Shows the fleet until Ctrl-C, or once. Returns the exit code."""
    console = Console()
    try:
        base = base_url(url) if url else found_server()
        if once or not console.is_terminal:
            fleet = _get(f"{base}/console/api/fleet", *_FLEET_FIELDS)
            requests = _get(f"{base}/console/api/requests", "requests")["requests"]
            console.print(screen(base, fleet, requests, rows=MAX_REQUESTS))
            return 0
        frames = _frames(base)
        fleet, requests = next(frames)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(screen(base, fleet, requests, rows=_rows(console, fleet)), refresh=True)
                frames, (fleet, requests) = _next(frames, base)
    except ServerError as error:
        print(f"mini-infer top: {error}", file=sys.stderr)
        return 1
    except StopIteration:
        print("mini-infer top: the gateway ended its stream of events: try again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


_FLEET_FIELDS = ("engines", "services")
Frame = tuple[dict[str, Any], list[dict[str, Any]]]
"""The fleet, and the latest requests, newest first."""


def _get(url: str, *lists: str) -> Any:
    with open_server(url, timeout_s=SILENCE_S) as response:
        return _read(url, response.read(), *lists)


def _read(url: str, text: bytes, *lists: str) -> Any:
    """Returns JSON of the console: an object with lists of these names, or a list if there are no names. Raises
    ServerError if it is something else.
    """
    try:
        found = json.loads(text)
        if not all(isinstance(one, list) for one in ([found[name] for name in lists] if lists else [found])):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ServerError(f"{url} is no console of a gateway: is --url that of one?") from None
    return found


def _next(frames: Iterator[Frame], base: str) -> tuple[Iterator[Frame], Frame]:
    """Returns the next frame, and the stream of those after it: another one where this one has ended. Raises
    ServerError if none can be opened.
    """
    try:
        return frames, next(frames)
    except (StopIteration, OSError, http.client.HTTPException):
        time.sleep(RETRY_PAUSE_S)  # The gateway starts again: one more try tells.
        frames = _frames(base)
        return frames, next(frames)


def _frames(base: str) -> Iterator[Frame]:
    """Yields a frame for each event: the first has no requests yet, if there are any, the next has."""
    fleet: dict[str, Any] | None = None
    requests: list[dict[str, Any]] = []
    histories: dict[str, list[Any]] = {}
    url = f"{base}{EVENTS_PATH}"
    with open_server(url, timeout_s=SILENCE_S) as response:
        for name, data in _events(response):
            if name == "requests":
                requests = (_read(url, data) + requests)[:MAX_REQUESTS]
            elif name == "fleet":
                fleet = _read(url, data, *_FLEET_FIELDS)
                histories = {engine["name"]: _grown(histories, engine) for engine in fleet["engines"]}
            if fleet is not None:
                for engine in fleet["engines"]:
                    engine["history"] = histories[engine["name"]]
                yield fleet, requests


def _grown(histories: dict[str, list[Any]], engine: dict[str, Any]) -> list[Any]:
    """Returns an engine's samples: the first event has all of them, later ones the newest."""
    if engine["history"]:
        return list(engine["history"])
    return [*histories.get(engine["name"], []), *([engine["now"]] if engine["now"] else [])][-MAX_SAMPLES:]


def _events(response: Any) -> Iterator[tuple[str, bytes]]:
    name = ""
    for line in response:
        if line.startswith(b"event: "):
            name = line[len(b"event: ") :].strip().decode(errors="replace")
        elif line.startswith(b"data: "):
            yield name, line[len(b"data: ") :]


def _rows(console: Console, fleet: dict[str, Any]) -> int:
    """Returns the number of requests that fit below the engines."""
    return max(3, console.height - len(fleet["engines"]) - len(fleet["services"]) - 10)
