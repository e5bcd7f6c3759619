"""Streaming clients of /v1/completions with token-id prompts, in processes of their own: one would be the limit."""

import asyncio
import itertools
import json
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Self

import aiohttp

from common.report import percentile

_LEAD_S = 0.3
_LEAD_S_PER_REQUEST = 0.001
"""Before a load begins, for the processes to make their prompts."""


@dataclass(slots=True)
class Answer:
    """What one client saw."""

    first_s: float
    """After the request was sent."""
    gaps_s: list[float]
    end_s: float
    """By this machine's monotonic clock."""


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests of one shape to one server."""

    url: str
    vocabulary: int
    prompt_tokens: int
    output_tokens: int
    model: str = "measured"

    def body(self, dice: random.Random, output_tokens: int) -> bytes:
        """A greedy streamed request for exactly so many tokens; the prompt's are random, none of them special."""
        return json.dumps(
            {
                "model": self.model,
                "prompt": [dice.randrange(3, self.vocabulary) for _ in range(self.prompt_tokens)],
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    async def request(self, session: aiohttp.ClientSession, body: bytes, output_tokens: int) -> Answer:
        """One request. RuntimeError: the server's usage does not tell of as many tokens as were asked for."""
        begin = time.perf_counter()
        arrivals: list[float] = []
        last = b""
        headers = {"content-type": "application/json"}
        async with session.post(self.url + "/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    arrivals.append(time.perf_counter())
                    last = line
        usage = json.loads(last[6:] or b"{}").get("usage")
        if not usage or usage["completion_tokens"] != output_tokens:
            raise RuntimeError(f"{output_tokens} tokens were asked for, usage says {usage}")
        arrivals.pop()  # the usage's own chunk
        if not arrivals:
            raise RuntimeError("a stream without tokens")
        gaps = [after - before for before, after in itertools.pairwise(arrivals)]
        return Answer(arrivals[0] - begin, gaps, arrivals[-1])


def burst(client: Client, seed: int, begin_s: float, offsets_s: list[float]) -> tuple[list[Answer], float]:
    """A request at each of the offsets from `begin_s`: answers, and the share of a processor that this took."""
    dice = random.Random(seed)
    bodies = [client.body(dice, client.output_tokens) for _ in offsets_s]

    async def request_at(session: aiohttp.ClientSession, body: bytes, due_s: float) -> Answer:
        await asyncio.sleep(due_s - time.perf_counter())
        return await client.request(session, body, client.output_tokens)

    async def run() -> list[Answer]:
        async with _session() as session:
            due = (begin_s + offset for offset in offsets_s)
            return await asyncio.gather(*map(request_at, itertools.repeat(session), bodies, due))

    cpu_s, wall_s = time.process_time(), time.perf_counter()
    answers = asyncio.run(run())
    return answers, (time.process_time() - cpu_s) / (time.perf_counter() - max(wall_s, begin_s))


def alone(client: Client, seed: int, tries: int) -> tuple[list[float], list[float]]:
    """One client: seconds to the first token of `tries` requests for one token, and the gaps of one long answer."""
    dice = random.Random(seed)

    async def run() -> tuple[list[float], list[float]]:
        async with _session() as session:
            first = [(await client.request(session, client.body(dice, 1), 1)).first_s for _ in range(tries)]
            output = client.output_tokens + 1
            return first, (await client.request(session, client.body(dice, output), output)).gaps_s

    return asyncio.run(run())


class Crowd:
    """Processes full of clients; a context manager. No prompt is ever sent twice."""

    def __init__(self, processes: int) -> None:
        self._size = processes
        self._dice = random.Random(1)

    def __enter__(self) -> Self:
        """Start them all: each has imported what it needs when this returns."""
        self._processes = ProcessPoolExecutor(self._size, multiprocessing.get_context("spawn"))
        list(self._processes.map(time.sleep, [_LEAD_S] * self._size))
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.shutdown(cancel_futures=True)

    def closed(self, client: Client, clients: int) -> dict[str, float]:
        """All clients at once, one request each."""
        return self._load(client, [0.0] * clients)

    def opened(self, client: Client, rate_per_s: float, requests: int) -> dict[str, float]:
        """Requests that arrive by a Poisson process, whether or not earlier ones have ended."""
        return self._load(
            client, list(itertools.accumulate(self._dice.expovariate(rate_per_s) for _ in range(requests)))
        )

    def single(self, client: Client, tries: int) -> dict[str, float]:
        """One client that waits for each answer."""
        first, gaps = self._processes.submit(alone, client, self._dice.getrandbits(64), tries).result()
        return {"ttft_ms_p50": percentile(first, 0.5) * 1e3, "itl_ms_p50": percentile(gaps, 0.5) * 1e3}

    def _load(self, client: Client, offsets_s: list[float]) -> dict[str, float]:
        begin_s = time.perf_counter() + _LEAD_S + _LEAD_S_PER_REQUEST * len(offsets_s)
        shares = [offsets_s[index :: self._size] for index in range(self._size)]
        parts = [
            self._processes.submit(burst, client, self._dice.getrandbits(64), begin_s, share)
            for share in shares
            if share
        ]
        found = [part.result() for part in parts]
        answers = [answer for part, _ in found for answer in part]
        took_s = max(answer.end_s for answer in answers) - begin_s
        return summary(answers, client.output_tokens, took_s) | {"client_cpu": max(share for _, share in found)}


def summary(answers: list[Answer], tokens: int, took_s: float) -> dict[str, float]:
    """Throughput, and percentiles over requests and over all gaps."""
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    first = [answer.first_s for answer in answers]
    return {
        "tok_s": len(answers) * tokens / took_s,
        **{f"ttft_ms_p{share}": percentile(first, share / 100) * 1e3 for share in (50, 99)},
        **{f"itl_ms_p{share}": percentile(gaps, share / 100) * 1e3 for share in (50, 99)},
        "chunks_per_request": len(gaps) / len(answers) + 1,
    }


def _session() -> aiohttp.ClientSession:
    """As many connections as there are clients, and no deadline."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
    )
