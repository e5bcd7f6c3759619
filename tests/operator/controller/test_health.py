import asyncio
from dataclasses import dataclass, field
from typing import cast

import aiohttp

from mini_infer_operator.controller.health import DEAF_AFTER_S, WatchHealth, serve_health
from mini_infer_operator.controller.reflector import Reflector
from mini_infer_operator.local.ports import free_ports
from mini_infer_operator.objects.kinds import BY_NAME, Kind


@dataclass
class Watch:
    kind: Kind
    heard_s: float = 0.0
    synced: asyncio.Event = field(default_factory=asyncio.Event)


async def test_a_watch_that_hangs_is_deafness_and_one_that_never_listed_is_not_ready() -> None:
    pods, services = Watch(BY_NAME["Pod"]), Watch(BY_NAME["Service"])
    now = 0.0
    health = WatchHealth(cast("list[Reflector]", [pods, services]), lambda: now)
    (port,) = free_ports(1)
    runner = await serve_health(health, port)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

            async def status(path: str) -> int:
                async with session.get(path) as response:
                    return response.status

            assert (await status("/healthz"), await status("/readyz")) == (200, 503)
            pods.synced.set()
            assert health.unsynced() == ["services"]
            services.synced.set()
            assert (await status("/healthz"), await status("/readyz")) == (200, 200)
            now = DEAF_AFTER_S + 1
            pods.heard_s = now
            assert health.deaf() == ["services"]
            assert (await status("/healthz"), await status("/readyz")) == (503, 200)
    finally:
        await runner.cleanup()
