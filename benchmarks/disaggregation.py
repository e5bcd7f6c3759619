"""Prefill and decode apart on two GPUs, against two unified replicas on the same two.

    python benchmarks/disaggregation.py --model qwen2.5-7b --out FILE --plot FILE
    python benchmarks/disaggregation.py --earlier FILE --plot FILE      the picture of what was measured before

One pair of servers with roles and two unified ones hold the two GPUs together, a server of each kind a GPU, and are
asked one kind after the other, all over HTTP; with `--gpus 0,0` all are on one, where only what one request at a time
sees (ttft, fetch) says something of two; with `--gpus 0+1,2+3` each is a tensor-parallel group:
- ttft: time to the first token by length of the prompt, one request at a time: of the prefill engine alone, and apart;
  their difference is what the transfer adds. (Two GPUs of a host can differ by 2 % in speed.)
- fetch: a prompt whose beginning a peer holds, fetched and computed.
- gaps: between tokens of streams that decode while long prompts flood in, beside quiet ones.
- goodput: share of requests within a target for the first token and one of two for gaps, by length of the prompts and
  by prompt tokens a second that arrive (Poisson); "break-even" is the least length from which apart keeps as many as
  unified.
- link: what the transfer adds where engines move only so many bytes a second (--kv-transfer-bandwidth); over TCP with
  UCX_TLS=tcp,cuda_copy, --parts link, --kv-transport nixl-host.
- trace: the same of the Mooncake trace (its requests that fit the context), by requests a second.
What each request saw is in the JSON, so that other targets can be applied. Unified: a request goes to the replica that
has the least to compute before its first token, what waits there and what is cached of the prompt counted in.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from common.budget import Budget
from common.engines import SMOKE_MODEL
from common.goodput import FLEETS, Grid, kept, plot, show
from common.models import model_folder, vocabulary
from common.report import log_line, make_parser, percentile, print_table, save, words
from common.servers import Server, free_port, started
from common.streams import Arrival, Clients, Fleet, body_of, replay, session, stream
from routing.workload import TRACE_VARIABLE, Workload, find_mooncake, mooncake, token_ids

PREFILL_FROM, FETCH_FROM = "x-mini-infer-prefill-from", "x-mini-infer-fetch-from"


_GRID = Grid(
    lengths=(1024, 4096, 8192), loads=(12_000, 24_000, 36_000), trace_rates=(2.0, 4.0),
    ttft_s=0.5, trace_ttft_s=1.0, gaps_s=(0.01, 0.02),
)  # fmt: skip
"""The trace's prompts are of up to 15,000 tokens, which take 0.4 s alone."""


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
    grid: Grid = _GRID
    load_s: float = 6.0
    output: int = 128
    trace_s: float = 25.0
    links: tuple[int, ...] = (2_000_000_000, 3_300_000_000, 5_000_000_000, 100_000_000_000)
    """Bytes a second of prefill engines; the last are no limit."""
    chunk: int = 512
    """Largest prefill chunk of unified replicas: a pass of 1,024 tokens of a 7B shape takes longer than a gap may."""


_KV_BYTES = 28_000_000_000
"""Of each server where two are on each GPU."""
_CONTEXT = 15_900
"""Tokens of a request of the trace, at most."""
_SHARED_KV_BYTES = 8_000_000_000
"""Where all are on one."""
SMOKE = Work(
    lengths=(64, 128), tries=2, long_prompt=128, streams=2, stream_tokens=20, floods=2, flood_per_s=5.0,
    grid=Grid((128,), (300,), (2.0,), 5.0, 5.0, (1.0,)), load_s=1.0, output=8, trace_s=1.0, links=(10_000_000,),
    chunk=64,
)  # fmt: skip


async def ttft(fleet: Fleet, clients: Clients, work: Work, tokens: int) -> list[float]:
    """Seconds of the first server, each but those of the first try."""
    async with session() as opened:
        seen = [
            await stream(opened, fleet.urls[0], body_of(clients.prompt(tokens), 2), fleet.headers)
            for _ in range(work.tries)
        ]
    return [one.first_s for one in seen[1:]]


async def fetch(holder: str, other: str, address: str, clients: Clients, work: Work) -> dict[str, float]:
    """Seconds to the first token of prompts that a peer holds, fetched and computed."""
    fetched, computed = list[float](), list[float]()
    async with session() as opened:
        for _ in range(work.tries):
            cached, own = (body_of(clients.prompt(work.long_prompt), 1) for _ in range(2))
            await stream(opened, holder, cached, {})
            fetched.append((await stream(opened, other, cached, {FETCH_FROM: address})).first_s)
            computed.append((await stream(opened, other, own, {})).first_s)
    return {"fetched": median(fetched[1:]), "computed": median(computed[1:])}


async def gaps(fleet: Fleet, clients: Clients, work: Work) -> dict[str, float]:
    """Gaps between tokens of streams that decode, quiet and while long prompts flood in."""
    # To make a long prompt holds the event loop up for milliseconds, and streams would seem to wait.
    flooding = [body_of(clients.prompt(work.long_prompt), 2) for _ in range(work.floods)]
    streamed = iter([body_of(clients.prompt(64), work.stream_tokens) for _ in range(2 * work.streams)])
    async with session() as opened:

        async def flood() -> tuple[float, float]:
            begin = time.perf_counter()
            options = []
            for body in flooding:
                options.append(asyncio.create_task(stream(opened, fleet.url, body, fleet.headers)))
                await asyncio.sleep(1 / work.flood_per_s)
            await asyncio.gather(*options)
            return begin, time.perf_counter()

        quiet = await asyncio.gather(*(stream(opened, fleet.url, next(streamed), {}) for _ in range(work.streams)))
        streams = [asyncio.create_task(stream(opened, fleet.url, next(streamed), {})) for _ in range(work.streams)]
        await asyncio.sleep(0.3)
        begin, end = await flood()
        loud = [gap for one in await asyncio.gather(*streams) for at, gap in one.gaps if begin <= at <= end]
    still = [gap for one in quiet for _, gap in one.gaps[len(one.gaps) // 10 :]]
    found = {"quiet p50": median(still), "quiet p99": percentile(still, 0.99)}
    if loud:
        found |= {"flood p50": median(loud), "flood p99": percentile(loud, 0.99)}
        found["ratio p99"] = found["flood p99"] / found["quiet p99"]
    return found


def poisson(clients: Clients, work: Work, tokens: int, load: int) -> list[Arrival]:
    """Prompts of so many tokens, together `load` tokens a second."""
    dice, at_s, found = random.Random(load + tokens), 0.0, list[Arrival]()
    while not found or at_s < work.load_s:
        found.append(Arrival(at_s, body_of(clients.prompt(tokens), work.output), tokens))
        at_s += dice.expovariate(load / tokens)
    return found


def from_trace(trace: Workload, work: Work, rate: float, vocabulary_size: int, salt: str) -> list[Arrival]:
    """The beginning of the trace, at so many requests a second."""
    requests = trace.first(max(2, int(rate * work.trace_s))).at(work.trace_s).requests
    return [
        Arrival(
            one.arrival_s,
            body_of(token_ids(one, salt, trace.block_tokens, vocabulary_size), one.output_tokens),
            one.prompt_tokens,
            one.blocks,
        )
        for one in requests
    ]


@dataclass(slots=True)
class Campaign:
    """What is asked, of which servers, for how long, and what was found."""

    options: argparse.Namespace
    work: Work
    budget: Budget
    folder: str
    caches: Path
    result: dict[str, Any]
    clients: Clients = field(init=False)

    def __post_init__(self) -> None:
        self.clients = Clients(vocabulary(self.folder))

    @contextmanager
    def servers(self, launches: list[tuple[str, dict[str, Any]]]) -> Iterator[list[Server]]:
        """Start so many at once, (GPU, flags) of each, and wait until each has had a first token."""
        smoke = self.options.smoke
        with ExitStack() as stack:
            found = []
            for gpu, flags in launches:
                moving = {"kv_transport": self.options.kv_transport, "kv_transfer_trust": "clients"}
                settings = (moving if "transfer_port" in flags else {}) | flags
                ranks = gpu.split("+")
                if len(ranks) > 1:
                    settings = settings | {"tensor_parallel_size": len(ranks)}
                environment = {"OMP_NUM_THREADS": "1"} if smoke else {"CUDA_VISIBLE_DEVICES": ",".join(ranks)}
                one = started("ours", self.folder, settings, self.caches, smoke, environment)
                found.append(stack.enter_context(one))
            for server in found:
                server.first_token(min(self.budget.left_s, 400))
            log_line(f"{len(found)} servers are ready")
            yield found

    def first_tokens(self, fleet: Fleet, part: str, name: str) -> None:
        """Of all lengths, one request at a time. The first transfer connects, and is not looked at."""
        found = self.result[part].setdefault(name, {})
        tries = self.result["tries"].setdefault(f"{part}, {name}", {})
        asyncio.run(ttft(fleet, self.clients, self.work, self.work.lengths[0]))
        for tokens in self.work.lengths:
            if self.budget.allows(part, 5):
                with self.budget.spending(part):
                    tries[str(tokens)] = asyncio.run(ttft(fleet, self.clients, self.work, tokens))
                    found[str(tokens)] = median(tries[str(tokens)])
        log_line(f"{name}: {part} {found}")
        save(self.options.out, self.result)

    def load(self, fleet: Fleet, part: str, name: str, label: str, arrivals: list[Arrival], ttft_s: float) -> None:
        """One cell of a fleet."""
        with self.budget.spending(part):
            seen = asyncio.run(replay(fleet, arrivals))
        self.result[part].setdefault(name, {})[label] = seen
        good = kept(seen, ttft_s, self.work.grid.gaps_s[-1])
        log_line(
            f"{name}, {part} {label}: {len(arrivals)} requests, {good:.0%} good, "
            f"ttft p50 {median(seen['ttft_s']):.3f} p99 {percentile(seen['ttft_s'], 0.99):.3f} s, "
            f"gaps {median(seen['gap_p95_s']) * 1e3:.1f} ms"
        )
        save(self.options.out, self.result)

    def loads(self, fleet: Fleet, name: str) -> None:
        """What is asked of both kinds of fleet."""
        parts, work = self.options.parts, self.work
        if "gaps" in parts and self.budget.allows("gaps", 20):
            with self.budget.spending("gaps"):
                self.result["gaps"][name] = asyncio.run(gaps(fleet, self.clients, work))
            log_line(f"{name}: gaps {self.result['gaps'][name]}")
        for label, cell in work.grid.cells() if "goodput" in parts else []:
            if self.budget.allows("goodput", 20):
                self.load(fleet, "goodput", name, label, poisson(self.clients, work, *cell), work.grid.ttft_s)
        trace = trace_that_fits(self.options.smoke) if "trace" in parts else None
        for rate in work.grid.trace_rates if trace is not None else ():
            if self.budget.allows("trace", 20):
                arrivals = from_trace(trace, work, rate, self.clients.vocabulary_size, name)
                self.load(fleet, "trace", name, f"{rate:g}/s", arrivals, work.grid.trace_ttft_s)

    def both_kinds(self) -> None:
        """A pair of servers with roles, and two unified ones where they are compared."""
        gpus, parts = self.options.gpus, self.options.parts
        kv_bytes = {"kv_cache_memory": _KV_BYTES if len(set(gpus)) == len(gpus) else _SHARED_KV_BYTES}
        ports = [free_port(), free_port()]
        launches = [
            (gpu, kv_bytes | {"role": role, "transfer_port": port})
            for role, port, gpu in zip(("prefill", "decode"), ports, gpus, strict=True)
        ]
        if {"gaps", "goodput", "trace"} & set(parts):
            launches += [(gpu, kv_bytes | {"long_prefill_token_threshold": self.work.chunk}) for gpu in gpus]
        with self.servers(launches) as (prefill, decode, *replicas):
            address = f"tcp://127.0.0.1:{ports[0]}"
            apart = Fleet([decode.url], {PREFILL_FROM: address})
            if "ttft" in parts:
                self.first_tokens(Fleet([prefill.url], {}), "ttft", "one engine")
                self.first_tokens(apart, "ttft", FLEETS[0])
            if "fetch" in parts and self.budget.allows("fetch", 10):
                found = asyncio.run(fetch(prefill.url, decode.url, address, self.clients, self.work))
                self.result["fetch"] = found
                log_line(f"fetch: {found}")
            self.loads(apart, FLEETS[0])
            self.result["metrics"] = [server.metrics("kv_transfer") for server in (prefill, decode)]
            if replicas:
                self.loads(Fleet([server.url for server in replicas], {}), FLEETS[1])

    def links(self) -> None:
        """Prefill engines that move no more than so many bytes a second, and one decode engine."""
        rates, (prefill_gpu, decode_gpu) = self.work.links, self.options.gpus
        ports = [free_port() for _ in rates]
        flags = {"kv_cache_memory": _SHARED_KV_BYTES}
        launches = [(decode_gpu, flags | {"role": "decode", "transfer_port": free_port()})]
        launches += [
            (prefill_gpu, flags | {"role": "prefill", "transfer_port": port, "kv_transfer_bandwidth": rate})
            for port, rate in zip(ports, rates, strict=True)
        ]
        with self.servers(launches) as (decode, *slow):
            self.first_tokens(Fleet([slow[0].url], {}), "link", "one engine")
            for rate, port in zip(rates, ports, strict=True):
                fleet = Fleet([decode.url], {PREFILL_FROM: f"tcp://127.0.0.1:{port}"})
                self.first_tokens(fleet, "link", f"{rate / 1e9:g} GB/s")
            self.result["link metrics"] = [server.metrics("kv_transfer") for server in (decode, *slow)]


def show_first_tokens(found: dict[str, dict[str, float]], title: str) -> None:
    """Of one engine, and what others add."""
    if len(found) > 1:
        alone, *others = found.values()
        rows = [
            [tokens, alone[tokens] * 1e3, *((one[tokens] - alone[tokens]) * 1e3 for one in others if tokens in one)]
            for tokens in alone
        ]
        print_table([f"{title}, ms", *list(found)[:1], *(f"{name} adds" for name in list(found)[1:])], rows)


def main() -> None:
    """See the module."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument(
        "--parts", type=words, default=words("ttft,fetch,gaps,goodput,trace"), metavar="NAME,...", help="also link"
    )
    parser.add_argument("--gpus", type=words, default=["0", "1"], help="of prefill and decode; 0+1,2+3: groups")
    parser.add_argument("--kv-transport", default="auto")
    parser.add_argument(
        "--chunk", type=int, metavar="N", help="largest prefill chunk of unified replicas (default: 512)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of goodput")
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="measure nothing: show this result")
    options = parser.parse_args()
    work = SMOKE if options.smoke else Work()
    if options.chunk:
        work = replace(work, chunk=options.chunk)
    result = json.loads(options.earlier.read_text()) if options.earlier else measured(options, work)
    show_first_tokens(result["ttft"], "first token of")
    show_first_tokens(result.get("link", {}), "first token by a link, of")
    show(result, work.grid)
    if options.plot:
        plot(result, work.grid, options.plot)


def measured(options: argparse.Namespace, work: Work) -> dict[str, Any]:
    """All parts, as far as the time allows."""
    result: dict[str, Any] = {"model": options.model, "transport": options.kv_transport, "gpus": options.gpus}
    parts = ("ttft", "fetch", "gaps", "goodput", "trace", "link", "tries")
    result |= {"chunk": work.chunk} | {part: {} for part in parts}
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(SMOKE_MODEL if options.smoke else options.model, Path(root))
        caches = Path(os.environ.get("CACHES", root)) / "caches"
        campaign = Campaign(options, work, Budget(options.time_limit_s), folder, caches, result)
        if set(options.parts) - {"link"}:
            campaign.both_kinds()
        if "link" in options.parts and campaign.budget.allows("link", 40):
            campaign.links()
    save(options.out, result)
    return result


def trace_that_fits(smoke: bool) -> Workload | None:
    """The Mooncake trace's requests that the context holds; of a smoke run, tiny ones. None: it is not here."""
    path = find_mooncake()
    if path is None:
        log_line(f"the trace is left out: {TRACE_VARIABLE} names no file of it")
        return None
    trace = mooncake(path)
    if smoke:
        requests = [replace(one, prompt_tokens=40, output_tokens=4, blocks=()) for one in trace.requests[:9]]
    else:
        requests = [one for one in trace.requests if one.prompt_tokens + one.output_tokens < _CONTEXT]
    return replace(trace, requests=tuple(requests))


if __name__ == "__main__":
    main()
