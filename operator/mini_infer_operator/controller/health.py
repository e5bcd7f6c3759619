"""Serves `/healthz`, `/readyz` and `/metrics`: the cluster is known, the API server is heard, and work goes on."""

import time
from collections.abc import Callable, Sequence

from aiohttp import web

from mini_infer_operator.controller.feed import RELIST_S, Feed

DEAF_AFTER_S = RELIST_S + 300.0
"""Seconds of silence after which a kind's watch counts as lost: the kind is listed at least every RELIST_S."""
STUCK_AFTER_S = 300.0
"""Seconds that a changed service may stay untried: the longest pause is 60 s, the longest pass 120 s."""


class Health:
    """Judges watches, queue and CRD. An unreachable API server is no fault, since a restart does not help."""

    def __init__(
        self,
        feeds: Sequence[Feed],
        untried_s: Callable[[], float] = lambda: 0.0,
        crd_problem: Callable[[], str] = lambda: "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`untried_s`: the longest that the queue left a changed service untried. `crd_problem`: "" if none."""
        self._feeds = feeds
        self._untried_s = untried_s
        self._crd_problem = crd_problem
        self._now = now

    def problems(self) -> list[str]:
        """Returns the problems that only a restart can solve; /healthz fails with them."""
        deaf = {feed.kind.plural for feed in self._feeds if self._now() - feed.last_seen_s > DEAF_AFTER_S}
        found = [f"the watch of {plural} hangs" for plural in sorted(deaf)]
        if (untried_s := self._untried_s()) > STUCK_AFTER_S:
            found.append(f"the queue hangs: a changed service was not tried for {untried_s:.0f} s")
        return found

    def unready(self) -> list[str]:
        """Returns the reasons why the operator cannot work yet; /readyz fails with them."""
        unsynced = {feed.kind.plural for feed in self._feeds if not feed.synced.is_set()}
        found = [f"{plural} are not listed yet" for plural in sorted(unsynced)]
        return [*found, *filter(None, [self._crd_problem()])]


async def serve_health(health: Callable[[], Health], metrics: Callable[[], bytes], port: int) -> web.AppRunner:
    """Serves the three paths until `.cleanup()` is called on the returned runner."""

    async def healthz(_: web.Request) -> web.Response:
        problems = health().problems()
        return web.json_response({"ok": not problems, "problems": problems}, status=503 if problems else 200)

    async def readyz(_: web.Request) -> web.Response:
        unready = health().unready()
        return web.json_response({"ready": not unready, "problems": unready}, status=503 if unready else 200)

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", scrape)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
