"""Reads the reports of all replicas of the gateway. A replica that does not answer is left out."""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import aiohttp

from mini_infer_contract.rollouts import ROLLOUTS_PATH, GatewayRollouts
from mini_infer_contract.scaling import SCALING_PATH, GatewayLoads
from mini_infer_operator.objects.engine_answers import read_answer

LONGEST_REPORT_BYTES = 4 << 20
"""A report of ten thousand engines is half as long."""
MOST_REPLICAS = 100
"""Replicas that are asked, of more addresses the first: a name may resolve to anything."""
RESOLVE_EVERY_S = 5.0
RESOLVE_TIMEOUT_S = 2.0

Report = TypeVar("Report")

log = logging.getLogger(__name__)


class GatewayLoadReader:
    """The gateway's replicas, found by their names in DNS."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        names: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`names` are HOST:PORT of admin ports; each may have several addresses, one a replica.

        `session` must not decompress bodies: a few kilobytes may become gigabytes.
        """
        self._session, self._names, self._clock = session, names, clock
        self._urls: tuple[str, ...] = ()
        self._resolved_s = float("-inf")

    async def read(self) -> dict[str, GatewayLoads]:
        """Returns the reports of `GET /scaling` by the replica's URL; empty if none answers."""
        return await self._read(SCALING_PATH, GatewayLoads)

    async def rollouts(self) -> dict[str, GatewayRollouts]:
        """Returns the reports of `GET /rollouts` by the replica's URL; empty if none answers."""
        return await self._read(ROLLOUTS_PATH, GatewayRollouts)

    async def _read(self, path: str, kind: type[Report]) -> dict[str, Report]:
        if self._clock() - self._resolved_s >= RESOLVE_EVERY_S:
            self._resolved_s = self._clock()
            await self._resolve()
        most = LONGEST_REPORT_BYTES
        answers = await asyncio.gather(*(read_answer(self._session, url + path, kind, most) for url in self._urls))
        return {url: answer for url, answer in zip(self._urls, answers, strict=True) if answer is not None}

    async def _resolve(self) -> None:
        """Resolves the names again. A name that has no address now leaves the replicas as they were."""
        loop, found = asyncio.get_running_loop(), dict[str, None]()
        for name in self._names:
            host, port = host_and_port(name)
            try:
                async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, TimeoutError, UnicodeError) as error:
                log.warning("no address of --gateways %s: %r", name, error)
                continue
            for _, _, _, _, address in addresses:
                shown = f"[{address[0]}]" if ":" in str(address[0]) else str(address[0])
                found[f"http://{shown}:{port}"] = None
        if found:
            self._urls = tuple(found)[:MOST_REPLICAS]


def host_and_port(name: str) -> tuple[str, int]:
    """Returns the parts of HOST:PORT or [IPV6]:PORT. Raises ValueError if `name` is neither."""
    found = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})", name)
    if not found or not 0 < int(found[3]) < 65_536:
        raise ValueError(f"{name!r} is no HOST:PORT, such as mini-infer-gateway-replicas.mini-infer-system.svc:8081")
    return found[1] or found[2], int(found[3])
