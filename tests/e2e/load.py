"""Open-loop load on a gateway: requests begin on time whatever the answers do, nothing is tried again."""

import asyncio
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp

from tests.e2e.commands import log_line

PROMPT = "one two three four five six seven eight nine ten "
REQUEST_LIMIT_S = 120.0
CONNECTIONS = 64
"""Kept alive and used again, as clients do."""
MAX_SHOWN_FAILURES = 20
"""At once, so that the logs of that moment can be read."""


@dataclass
class Result:
    """What came of the requests."""

    done: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    durations_s: list[float] = field(default_factory=list)

    def line(self) -> str:
        """For people."""
        ordered = sorted(self.durations_s) or [0.0]
        p99 = ordered[int(0.99 * (len(ordered) - 1))]
        return f"{self.failures.total()} of {self.done} requests failed, p99 {p99:.2f} s {dict(self.failures) or ''}"


class OpenLoad:
    """`with OpenLoad(url, model, rate)`: load runs in a thread of its own until the end of the block."""

    def __init__(self, url: str, model: str, per_second: float) -> None:
        self.result = Result()
        self._url = f"{url}/v1/completions"
        self._model = model
        self._pause_s = 1 / per_second
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(REQUEST_LIMIT_S + 10)

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=CONNECTIONS)
        timeouts = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeouts) as session,
            asyncio.TaskGroup() as tasks,
        ):
            due_s, number = time.monotonic(), 0
            while not self._stop.is_set():
                tasks.create_task(self._one(session, number))
                number += 1
                due_s += self._pause_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def _one(self, session: aiohttp.ClientSession, number: int) -> None:
        begun_s = time.monotonic()
        body = {"model": self._model, "prompt": PROMPT * (1 + number % 7), "max_tokens": 8, "temperature": 0}
        try:
            async with session.post(self._url, json=body) as response:
                text = await response.text()
                if response.status != 200:
                    self._failed(f"{response.status} {text[:120]}", begun_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._failed(f"{type(error).__name__} {error}"[:120], begun_s)
        self.result.done += 1
        self.result.durations_s.append(time.monotonic() - begun_s)

    def _failed(self, how: str, begun_s: float) -> None:
        self.result.failures[how] += 1
        if self.result.failures.total() <= MAX_SHOWN_FAILURES:
            log_line(f"a request failed after {time.monotonic() - begun_s:.1f} s: {how}")
