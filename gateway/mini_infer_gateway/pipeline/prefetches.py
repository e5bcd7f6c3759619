"""Announces sessions to the engines for which their requests wait, so that they load blocks from lower tiers meanwhile.

One message is under way to an engine at a time, and has all sessions that have come since the last. Nothing waits for
an answer: a message that fails costs the prefetch alone.
"""

import asyncio
import logging
from collections.abc import Callable
from math import inf

import msgspec

from mini_infer_contract.launch import KV_PREFETCH_PATH, MAX_LEASE_S, MAX_PREFETCHED
from mini_infer_contract.peer_auth import PEER_HEADER
from mini_infer_gateway.http.upstream import Upstream, UpstreamError

LEAST_TTL_S = 10.0
"""Shortest time for which an engine keeps the blocks of an announced session."""
TIMEOUT_S = 2.0
MAX_WAITING = 4 * MAX_PREFETCHED
"""Sessions that wait for the message to one engine; more are dropped."""
REFUSED_PAUSE_S = 60.0
"""Seconds without messages to an engine that has refused one: it is older, or has no such page."""

log = logging.getLogger(__name__)


class Prefetches:
    """The messages to all engines."""

    def __init__(self, upstream: Upstream, count: Callable[[str, int], None], clock: Callable[[], float]) -> None:
        """`count` is called with an outcome (sent, failed, dropped) and a number of sessions."""
        self._upstream, self._count, self._clock = upstream, count, clock
        self._waiting: dict[str, dict[str, float]] = {}
        """Seconds of each session's wait by the id of its last request, by the engine's address."""
        self._paused_until_s: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def announce(self, url: str, request_id: str, wait_s: float) -> None:
        """Announces that the session of an engine's earlier request waits, for `wait_s` seconds as is predicted."""
        if self._paused_until_s.get(url, -inf) > self._clock():
            self._count("dropped", 1)
            return
        waiting = self._waiting.setdefault(url, {})
        if len(waiting) >= MAX_WAITING:
            self._count("dropped", 1)
            return
        waiting[request_id] = wait_s
        if url not in self._tasks:
            self._tasks[url] = asyncio.create_task(self._send(url), name=f"announce sessions to {url}")

    async def close(self) -> None:
        """Ends all messages."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, url: str) -> None:
        try:
            while waiting := self._waiting.pop(url, None):
                names = list(waiting)
                for begin in range(0, len(names), MAX_PREFETCHED):
                    part = names[begin : begin + MAX_PREFETCHED]
                    await self._post(url, part, max(waiting[name] for name in part))
        finally:
            del self._tasks[url]
            self._waiting.pop(url, None)

    async def _post(self, url: str, request_ids: list[str], wait_s: float) -> None:
        ttl_s = min(MAX_LEASE_S, max(LEAST_TTL_S, 2 * wait_s))
        body = msgspec.json.encode({"request_ids": request_ids, "ttl_s": ttl_s})
        # Engines without keys want the header all the same, with any value: no web page can send it.
        headers = [] if url in self._upstream.proofs else [(PEER_HEADER.encode(), b"gateway")]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, _ = await self._upstream.post(url, KV_PREFETCH_PATH, body, TIMEOUT_S, headers=headers)
        except (UpstreamError, TimeoutError) as error:
            log.info("sessions are not announced to %s: %s", url, error or type(error).__name__)
            status = 0
        if 400 <= status < 500:
            log.info("%s answers %d to %s: no sessions are announced to it for a while", url, status, KV_PREFETCH_PATH)
            now_s = self._clock()
            self._paused_until_s = {one: until_s for one, until_s in self._paused_until_s.items() if until_s > now_s}
            self._paused_until_s[url] = now_s + REFUSED_PAUSE_S
        self._count("sent" if 200 <= status < 300 else "failed", len(request_ids))
