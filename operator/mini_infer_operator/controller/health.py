"""Whether the operator still hears the API server: `/healthz` and `/readyz`."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from aiohttp import web

Key = TypeVar("Key", bound=Hashable)

DEAF_AFTER_S = 90.0
"""A change that a list shows and the watch has not delivered for this long: the watch is dead, whatever it says."""


class WatchHealth:
    """Compares what watches delivered with what lists show; quiet clusters are healthy, deaf operators are not.

    The age of the last event alone cannot tell the two apart: a cluster at rest sends none.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: dict[Hashable, str] = {}  # key -> resourceVersion that the watch delivered last
        self._missed: dict[Hashable, tuple[str, float]] = {}  # key -> resourceVersion in a list, and since when
        self.ready = False
        """Set once a list has succeeded."""

    def saw(self, key: Hashable, resource_version: str) -> None:
        """A watch delivered this version."""
        self._seen[key] = resource_version
        self._missed.pop(key, None)

    def listed(self, versions: Mapping[Key, str]) -> list[Key]:
        """A list shows these versions: all there are. Returns the keys whose version the watch has not delivered."""
        self.ready = True
        self._seen = {key: version for key, version in self._seen.items() if key in versions}
        missed = {key: version for key, version in versions.items() if self._seen.get(key) != version}
        self._missed = {
            key: (version, self._missed[key][1] if key in self._missed else self._now())
            for key, version in missed.items()
        }
        return list(missed)

    def alive(self) -> bool:
        """Whether every listed change reached us by the watch in time."""
        return all(self._now() - since < DEAF_AFTER_S for _, since in self._missed.values())


async def serve_health(health: WatchHealth, port: int) -> web.AppRunner:
    """Serve both paths until `.cleanup()` of what is returned."""

    async def healthz(_: web.Request) -> web.Response:
        alive = health.alive()
        return web.json_response({"status": "ok" if alive else "the watch is deaf"}, status=200 if alive else 503)

    async def readyz(_: web.Request) -> web.Response:
        return web.json_response({"ready": health.ready}, status=200 if health.ready else 503)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
