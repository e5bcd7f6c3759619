"""Clients of several servers: streams of prompts of token ids, what each saw, and loads that are replayed."""

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import aiohttp
from routing.workload import MOONCAKE_BLOCK_TOKENS

from common.report import percentile


@dataclass(slots=True)
class Seen:
    """What one client saw."""

    first_s: float
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(when it ended, how long it was)."""


class Clients:
    """Streams of token-id prompts from one event loop."""

    def __init__(self, vocabulary_size: int) -> None:
        self._dice, self.vocabulary_size = random.Random(0), vocabulary_size

    def prompt(self, tokens: int) -> list[int]:
        """One that nobody has seen."""
        return [self._dice.randrange(3, self.vocabulary_size) for _ in range(tokens)]


def body_of(prompt: list[int], output: int) -> bytes:
    """Of a request."""
    body = {"model": "measured", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    return json.dumps(body | {"stream": True}).encode()


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: dict[str, str],
    on_first_token: Callable[[], None] = lambda: None,
) -> Seen:
    """One request; `on_first_token` is called at its first token. RuntimeError: it is not answered with tokens."""
    begin, arrivals = time.perf_counter(), list[float]()
    json_headers = {"content-type": "application/json"} | headers
    async with session.post(url + "/v1/completions", data=body, headers=json_headers) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                if not arrivals:
                    on_first_token()
                arrivals.append(time.perf_counter())
    if not arrivals:
        raise RuntimeError("a stream without tokens")
    gaps = [(after, after - before) for before, after in itertools.pairwise(arrivals)]
    return Seen(arrivals[0] - begin, gaps)


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """For as many streams as there are."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as opened:
        yield opened


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a load."""

    at_s: float
    body: bytes
    prompt_tokens: int
    blocks: tuple[int, ...] = ()
    """Of BLOCK tokens each, those that others may share."""


@dataclass(slots=True)
class Fleet:
    """The servers that requests go to, and what else they are told."""

    urls: list[str]
    headers: dict[str, str]
    _next: Iterator[int] = field(default_factory=itertools.count)
    _waiting: list[int] = field(default_factory=list)
    """Prompt tokens by server of requests without a first token."""
    _cached: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting, self._cached = [0] * len(self.urls), [set() for _ in self.urls]

    @property
    def url(self) -> str:
        """The next one's."""
        return self.urls[next(self._next) % len(self.urls)]

    def take(self, arrival: Arrival) -> tuple[int, int]:
        """The number of the server that a request goes to, and how many tokens it has to compute for it."""
        computed = [
            arrival.prompt_tokens
            - MOONCAKE_BLOCK_TOKENS * sum(1 for _ in itertools.takewhile(cached.__contains__, arrival.blocks))
            for cached in self._cached
        ]
        chosen = min(range(len(computed)), key=lambda number: self._waiting[number] + computed[number])
        self._waiting[chosen] += computed[chosen]
        self._cached[chosen].update(arrival.blocks)
        return chosen, computed[chosen]

    def first_token(self, number: int, computed: int) -> None:
        """A first token has come from there."""
        self._waiting[number] -= computed

    async def send(self, opened: aiohttp.ClientSession, arrival: Arrival) -> Seen:
        """To the server with the least to compute before its first token."""
        number, computed = self.take(arrival)
        on_first_token = partial(self.first_token, number, computed)
        return await stream(opened, self.urls[number], arrival.body, self.headers, on_first_token)


async def replay(fleet: Fleet, arrivals: list[Arrival]) -> dict[str, list[float]]:
    """What each request saw: seconds to its first token, and the gap that 95 % of its gaps do not exceed."""
    async with session() as opened:
        sent, begin = [], time.perf_counter()
        for arrival in arrivals:
            await asyncio.sleep(arrival.at_s - (time.perf_counter() - begin))
            sent.append(asyncio.create_task(fleet.send(opened, arrival)))
        seen = await asyncio.gather(*sent)
    return {
        "ttft_s": [round(one.first_s, 4) for one in seen],
        "gap_p95_s": [round(percentile([gap for _, gap in one.gaps], 0.95), 5) if one.gaps else 0.0 for one in seen],
    }
