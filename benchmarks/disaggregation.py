"""Prefill and decode apart on two GPUs, against two unified replicas on the same two.

    python benchmarks/disaggregation.py --model qwen2.5-7b --out FILE

One pair of servers with roles, then two unified ones, all over HTTP; each with its own GPU, or with `--gpus 0,0` both
on one, where only what one request at a time sees (ttft, fetch) says something of two:
- ttft: time to the first token by length of the prompt, one request at a time: of one engine alone, and apart; their
  difference is what the transfer adds.
- fetch: a prompt whose beginning a peer holds, fetched and computed.
- gaps: between tokens of streams that decode while long prompts flood in, beside quiet ones.
- goodput: share of requests within both targets, by rate of Poisson arrivals; unified: in turns to the two replicas.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from common.budget import Budget
from common.engines import SMOKE_MODEL
from common.models import model_folder, vocabulary
from common.report import make_parser, percentile, print_table, save, say, words
from common.servers import Server, free_port, started

PREFILL_FROM, FETCH_FROM = "x-mini-infer-prefill-from", "x-mini-infer-fetch-from"


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of the servers."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    tries: int = 7
    long_prompt: int = 4096
    streams: int = 16
    stream_tokens: int = 600
    floods: int = 24
    flood_per_s: float = 6.0
    rates: tuple[float, ...] = (2.0, 4.0, 6.0, 8.0, 10.0)
    load_s: float = 10.0
    output: int = 200
    ttft_s: float = 0.5
    gap_s: float = 0.02
    chunk: int = 1024
    """Largest prefill chunk of unified replicas."""


_SHARED_KV_BYTES = 8_000_000_000
"""Of each server where both are on one GPU."""
SMOKE = Work((64, 128), 2, 128, 2, 20, 2, 5.0, (2.0,), 1.0, 8, 5.0, 1.0, 64)


@dataclass(slots=True)
class Seen:
    """What one client saw."""

    first_s: float
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(when it ended, how long it was)."""


class Clients:
    """Streams of token-id prompts from one event loop."""

    def __init__(self, words_known: int) -> None:
        self._dice, self._known = random.Random(0), words_known

    def prompt(self, tokens: int) -> list[int]:
        """One that nobody has seen."""
        return [self._dice.randrange(3, self._known) for _ in range(tokens)]

    async def ask(
        self, session: aiohttp.ClientSession, url: str, prompt: list[int], output: int, headers: dict[str, str]
    ) -> Seen:
        """One request. RuntimeError: it is not answered with so many tokens."""
        body = {"model": "measured", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body | {"stream": True})
        begin, arrivals = time.perf_counter(), list[float]()
        json_headers = {"content-type": "application/json"} | headers
        async with session.post(url + "/v1/completions", data=data, headers=json_headers) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
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


@dataclass(slots=True)
class Fleet:
    """The servers that requests go to in turns, and what else they are told."""

    urls: list[str]
    headers: dict[str, str]
    _turn: Iterator[int] = field(default_factory=itertools.count)

    @property
    def url(self) -> str:
        """The next one's."""
        return self.urls[next(self._turn) % len(self.urls)]


async def ttft(fleet: Fleet, clients: Clients, work: Work, tokens: int) -> float:
    """Seconds, the median; of the first server."""
    async with session() as opened:
        seen = [
            await clients.ask(opened, fleet.urls[0], clients.prompt(tokens), 2, fleet.headers)
            for _ in range(work.tries)
        ]
    return median(one.first_s for one in seen[1:])


async def fetch(holder: str, other: str, address: str, clients: Clients, work: Work) -> dict[str, float]:
    """Seconds to the first token of prompts that a peer holds, fetched and computed."""
    fetched, computed = list[float](), list[float]()
    async with session() as opened:
        for _ in range(work.tries):
            prompt = clients.prompt(work.long_prompt)
            await clients.ask(opened, holder, prompt, 1, {})
            fetched.append((await clients.ask(opened, other, prompt, 1, {FETCH_FROM: address})).first_s)
            own = clients.prompt(work.long_prompt)
            computed.append((await clients.ask(opened, other, own, 1, {})).first_s)
    return {"fetched": median(fetched[1:]), "computed": median(computed[1:])}


async def gaps(fleet: Fleet, clients: Clients, work: Work) -> dict[str, float]:
    """Gaps between tokens of streams that decode, quiet and while long prompts flood in."""
    async with session() as opened:

        async def stream() -> Seen:
            return await clients.ask(opened, fleet.url, clients.prompt(64), work.stream_tokens, {})

        async def flood() -> tuple[float, float]:
            begin = time.perf_counter()
            asked = []
            for _ in range(work.floods):
                prompt = clients.prompt(work.long_prompt)
                asked.append(asyncio.create_task(clients.ask(opened, fleet.url, prompt, 2, fleet.headers)))
                await asyncio.sleep(1 / work.flood_per_s)
            await asyncio.gather(*asked)
            return begin, time.perf_counter()

        quiet = await asyncio.gather(*(stream() for _ in range(work.streams)))
        streams = [asyncio.create_task(stream()) for _ in range(work.streams)]
        await asyncio.sleep(0.3)
        begin, end = await flood()
        loud = [gap for one in await asyncio.gather(*streams) for at, gap in one.gaps if begin <= at <= end]
    still = [gap for one in quiet for _, gap in one.gaps[len(one.gaps) // 10 :]]
    found = {"quiet p50": median(still), "quiet p99": percentile(still, 0.99)}
    if loud:
        found |= {"flood p50": median(loud), "flood p99": percentile(loud, 0.99)}
        found["ratio p99"] = found["flood p99"] / found["quiet p99"]
    return found


async def goodput(fleet: Fleet, clients: Clients, work: Work, rate: float) -> dict[str, float]:
    """Of requests that arrive at this rate: the share within both targets, and what they saw."""
    dice = random.Random(rate)
    async with session() as opened:
        asked = []
        end = time.perf_counter() + work.load_s
        while time.perf_counter() < end:
            prompt = clients.prompt(work.long_prompt)
            asked.append(asyncio.create_task(clients.ask(opened, fleet.url, prompt, work.output, fleet.headers)))
            await asyncio.sleep(dice.expovariate(rate))
        seen = await asyncio.gather(*asked)
    tails = [percentile([gap for _, gap in one.gaps], 0.95) for one in seen]
    good = sum(one.first_s <= work.ttft_s and tail <= work.gap_s for one, tail in zip(seen, tails, strict=True))
    return {
        "requests": len(seen),
        "good": good / len(seen),
        "goodput_per_s": good / work.load_s,
        "ttft_p50": median(one.first_s for one in seen),
        "ttft_p99": percentile([one.first_s for one in seen], 0.99),
        "gap_p95_p50": median(tails),
        "gap_p95_p99": percentile(tails, 0.99),
    }


def of_gpu(gpu: str, smoke: bool) -> dict[str, str]:
    """The environment of a server that sees one GPU."""
    return {"OMP_NUM_THREADS": "1"} if smoke else {"CUDA_VISIBLE_DEVICES": gpu}


def wait_for(servers: list[Server], budget: Budget) -> None:
    """Until each has had a first token."""
    for server in servers:
        server.first_token(min(budget.left_s, 400))


def run_parts(fleet: Fleet, name: str, clients: Clients, work: Work, asked: Any, result: Any, budget: Budget) -> None:
    """What is asked of both kinds of fleet."""
    if "ttft" in asked.parts and fleet.headers:
        found = result["ttft"].setdefault(name, {})
        for tokens in work.lengths:
            if budget.allows("ttft", 5):
                with budget.spending("ttft"):
                    found[str(tokens)] = asyncio.run(ttft(fleet, clients, work, tokens))
        say(f"{name}: ttft {found}")
    if "gaps" in asked.parts and budget.allows("gaps", 20):
        with budget.spending("gaps"):
            result["gaps"][name] = asyncio.run(gaps(fleet, clients, work))
        say(f"{name}: gaps {result['gaps'][name]}")
    if "goodput" in asked.parts:
        found = result["goodput"].setdefault(name, {})
        for rate in work.rates:
            if budget.allows("goodput", work.load_s + 10):
                with budget.spending("goodput"):
                    found[str(rate)] = asyncio.run(goodput(fleet, clients, work, rate))
                say(f"{name}: {rate:g}/s {found[str(rate)]}")
    save(asked.out, result)


def main() -> None:
    """See the module."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--parts", type=words, default=["ttft", "fetch", "gaps", "goodput"])
    parser.add_argument("--gpus", type=words, default=["0", "1"], help="of prefill and decode")
    parser.add_argument("--kv-transport", default="auto")
    asked = parser.parse_args()
    budget, work = Budget(asked.time_limit_s), SMOKE if asked.smoke else Work()
    result: dict[str, Any] = {"model": asked.model, "transport": asked.kv_transport, "gpus": asked.gpus}
    result |= {"ttft": {}, "fetch": {}, "gaps": {}, "goodput": {}}
    settings: dict[str, Any] = {"kv_transport": asked.kv_transport}
    if len(set(asked.gpus)) < len(asked.gpus):
        settings["kv_cache_memory"] = _SHARED_KV_BYTES
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(SMOKE_MODEL if asked.smoke else asked.model, Path(root))
        clients = Clients(vocabulary(folder))
        caches = Path(os.environ.get("CACHES", root)) / "caches"
        ports = [free_port(), free_port()]
        with ExitStack() as stack:
            pair = [
                stack.enter_context(
                    started(
                        "ours",
                        folder,
                        settings | {"role": role, "transfer_port": port},
                        caches,
                        asked.smoke,
                        of_gpu(gpu, asked.smoke),
                    )
                )
                for role, port, gpu in zip(("prefill", "decode"), ports, asked.gpus, strict=True)
            ]
            wait_for(pair, budget)
            say("prefill and decode are ready")
            address = f"tcp://127.0.0.1:{ports[0]}"
            apart = Fleet([pair[1].url], {PREFILL_FROM: address})
            one_engine = Fleet([pair[1].url], {})
            asyncio.run(ttft(apart, clients, work, work.lengths[0]))  # the first transfer connects
            if "ttft" in asked.parts:
                found = result["ttft"].setdefault("one engine", {})
                for tokens in work.lengths:
                    if budget.allows("ttft", 5):
                        with budget.spending("ttft"):
                            found[str(tokens)] = asyncio.run(ttft(one_engine, clients, work, tokens))
                say(f"one engine: ttft {found}")
            if "fetch" in asked.parts and budget.allows("fetch", 10):
                result["fetch"] = asyncio.run(fetch(pair[0].url, pair[1].url, address, clients, work))
                say(f"fetch: {result['fetch']}")
            run_parts(apart, "apart", clients, work, asked, result, budget)
            result["metrics"] = [server.metrics("kv_transfer") for server in pair]
        unified_parts = {"gaps", "goodput"} & set(asked.parts)
        if unified_parts and budget.allows("start", 35):
            with ExitStack() as stack:
                unified_settings = settings | {"long_prefill_token_threshold": work.chunk}
                replicas = [
                    stack.enter_context(
                        started("ours", folder, unified_settings, caches, asked.smoke, of_gpu(gpu, asked.smoke))
                    )
                    for gpu in asked.gpus
                ]
                wait_for(replicas, budget)
                say("two unified replicas are ready")
                unified = Fleet([server.url for server in replicas], {})
                run_parts(unified, "two unified", clients, work, asked, result, budget)
    save(asked.out, result)
    alone, split = result["ttft"].get("one engine", {}), result["ttft"].get("apart", {})
    rows = [
        [f"ttft {tokens}, ms", alone[tokens] * 1e3, split[tokens] * 1e3, (split[tokens] - alone[tokens]) * 1e3]
        for tokens in alone
        if tokens in split
    ]
    print_table(["", "one engine", "apart", "difference"], rows)
    found = [result["goodput"].get(name, {}) for name in ("apart", "two unified")]
    grid = [[f"{rate:g}/s", *(one.get(str(rate), {}).get("good", "-") for one in found)] for rate in work.rates]
    print_table(["good share at", "apart", "two unified"], grid)


if __name__ == "__main__":
    main()
