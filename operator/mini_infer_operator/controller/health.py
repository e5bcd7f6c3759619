"""Whether the operator knows the cluster and still hears the API server: `/healthz` and `/readyz`."""

import time
from collections.abc import Callable, Sequence

from aiohttp import web

from mini_infer_operator.controller.reflector import Reflector

DEAF_AFTER_S = 300.0
"""A watch that neither heard nor tried anything for this long hangs; a healthy one ends its silence after 100 s."""


class WatchHealth:
    """What the watches say of themselves. An API server that is away is no fault of ours: a restart would not help."""

    def __init__(self, reflectors: Sequence[Reflector], now: Callable[[], float] = time.monotonic) -> None:
        self._reflectors = reflectors
        self._now = now

    def unsynced(self) -> list[str]:
        """Plurals of the kinds that were never listed completely."""
        return sorted({watch.kind.plural for watch in self._reflectors if not watch.synced.is_set()})

    def deaf(self) -> list[str]:
        """Plurals of the kinds whose watch hangs."""
        return sorted({watch.kind.plural for watch in self._reflectors if self._now() - watch.heard_s > DEAF_AFTER_S})


async def serve_health(health: WatchHealth, port: int) -> web.AppRunner:
    """Serve both paths until `.cleanup()` of what is returned."""

    async def healthz(_: web.Request) -> web.Response:
        deaf = health.deaf()
        return web.json_response({"status": "deaf" if deaf else "ok", "deaf": deaf}, status=503 if deaf else 200)

    async def readyz(_: web.Request) -> web.Response:
        unsynced = health.unsynced()
        return web.json_response({"ready": not unsynced, "not listed yet": unsynced}, status=503 if unsynced else 200)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
