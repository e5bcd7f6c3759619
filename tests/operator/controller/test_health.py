import asyncio
from dataclasses import dataclass, field
from typing import cast

import aiohttp

from mini_infer_operator.controller.feed import Feed
from mini_infer_operator.controller.health import DEAF_AFTER_S, STUCK_AFTER_S, Health, serve_health
from mini_infer_operator.local.ports import free_ports
from mini_infer_operator.objects.kinds import BY_NAME, Kind


@dataclass
class Watch:
    kind: Kind
    last_seen_s: float = 0.0
    synced: asyncio.Event = field(default_factory=asyncio.Event)


async def test_health_is_bad_when_a_restart_helps_and_unready_when_something_is_missing() -> None:
    pods, services = Watch(BY_NAME["Pod"]), Watch(BY_NAME["Service"])
    now, untried_s, crd = 0.0, 0.0, ""
    watches = cast("list[Feed]", [pods, services])
    health = Health(watches, lambda: untried_s, lambda: crd, lambda: now)
    (port,) = free_ports(1)
    runner = await serve_health(lambda: health, lambda: b"m 1\n", port)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

            async def status(path: str) -> int:
                async with session.get(path) as response:
                    return response.status

            assert (await status("/healthz"), await status("/readyz")) == (200, 503)
            pods.synced.set()
            assert health.unready() == ["services are not listed yet"]
            services.synced.set()
            assert (await status("/healthz"), await status("/readyz")) == (200, 200)
            now = DEAF_AFTER_S + 1
            pods.last_seen_s = now
            assert health.problems() == ["the watch of services hangs"]
            assert (await status("/healthz"), await status("/readyz")) == (503, 200)
            services.last_seen_s = now
            untried_s = STUCK_AFTER_S + 1
            assert health.problems() == ["the queue hangs: a changed service was not tried for 301 s"]
            untried_s, crd = 0.0, "the CRD is older"
            assert (await status("/healthz"), await status("/readyz")) == (200, 503)
            assert health.unready() == ["the CRD is older"]
            async with session.get("/metrics") as response:
                assert (response.content_type, await response.text()) == ("text/plain", "m 1\n")
    finally:
        await runner.cleanup()
