"""A streaming client of /v1/completions with token-id prompts, and the two ways to use many of it."""

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from common.report import percentile


@dataclass(slots=True)
class Answer:
    """What one client saw."""

    first_s: float
    gaps_s: list[float]
    total_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests of one shape to one server."""

    url: str
    vocabulary: int
    prompt_tokens: int
    output_tokens: int
    model: str = "measured"

    def prompt(self, dice: random.Random) -> list[int]:
        """Random ids, none of them special."""
        return [dice.randrange(3, self.vocabulary) for _ in range(self.prompt_tokens)]

    async def ask(self, session: aiohttp.ClientSession, prompt: list[int], output_tokens: int) -> Answer:
        """One streamed request, greedy; the server's usage must tell of as many tokens as were asked for."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        begin = time.perf_counter()
        arrivals: list[float] = []
        last = b""
        headers = {"content-type": "application/json"}
        async with session.post(self.url + "/v1/completions", data=data, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    arrivals.append(time.perf_counter())
                    last = line
        end = time.perf_counter()
        usage = json.loads(last[6:]).get("usage")
        if not usage or usage["completion_tokens"] != output_tokens:
            raise RuntimeError(f"{output_tokens} tokens were asked for, usage says {usage}")
        arrivals.pop()  # the usage's own chunk
        if not arrivals:
            raise RuntimeError("a stream without tokens")
        gaps = [after - before for before, after in itertools.pairwise(arrivals)]
        return Answer(arrivals[0] - begin, gaps, end - begin, output_tokens)

    async def closed(self, session: aiohttp.ClientSession, clients: int, dice: random.Random) -> dict[str, float]:
        """All clients at once, one request each."""
        prompts = [self.prompt(dice) for _ in range(clients)]
        begin = time.perf_counter()
        answers = await asyncio.gather(*(self.ask(session, prompt, self.output_tokens) for prompt in prompts))
        return summary(answers, time.perf_counter() - begin)

    async def single(self, session: aiohttp.ClientSession, tries: int, dice: random.Random) -> dict[str, float]:
        """One client: times to the first token of `tries` requests, and the gaps of one long answer."""
        first = [(await self.ask(session, self.prompt(dice), 1)).first_s for _ in range(tries)]
        gaps = (await self.ask(session, self.prompt(dice), self.output_tokens + 1)).gaps_s
        return {"ttft_ms_p50": percentile(first, 0.5) * 1e3, "itl_ms_p50": percentile(gaps, 0.5) * 1e3}

    async def opened(
        self, session: aiohttp.ClientSession, rate_per_s: float, requests: int, dice: random.Random
    ) -> dict[str, float]:
        """Requests that arrive by a Poisson process, whether or not earlier ones have ended."""
        prompts = [self.prompt(dice) for _ in range(requests)]
        begin = time.perf_counter()
        due, tasks = 0.0, []
        for prompt in prompts:
            due += dice.expovariate(rate_per_s)
            await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(session, prompt, self.output_tokens)))
        return summary(await asyncio.gather(*tasks), time.perf_counter() - begin)


def summary(answers: list[Answer], took_s: float) -> dict[str, Any]:
    """Throughput, and percentiles over requests and over all gaps."""
    gaps = [gap for answer in answers for gap in answer.gaps_s]
    first = [answer.first_s for answer in answers]
    return {
        "requests": len(answers),
        "requests_per_s": len(answers) / took_s,
        "tok_s": sum(answer.tokens for answer in answers) / took_s,
        **{f"ttft_ms_p{share}": percentile(first, share / 100) * 1e3 for share in (50, 90, 99)},
        **{f"itl_ms_p{share}": percentile(gaps, share / 100) * 1e3 for share in (50, 90, 99)},
        "total_s_p50": percentile([answer.total_s for answer in answers], 0.5),
        "chunks_per_request": len(gaps) / len(answers) + 1,
    }


def make_session() -> aiohttp.ClientSession:
    """As many connections as there are clients, and no deadline."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
    )
