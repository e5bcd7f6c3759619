"""Prefill and decode apart on two GPUs, against two unified replicas on the same two.

    python benchmarks/disaggregation.py --model qwen2.5-7b --out FILE --plot FILE
    python benchmarks/disaggregation.py --earlier FILE --plot FILE      the picture of what was measured before

One pair of servers with roles and two unified ones hold the two GPUs together, a server of each kind a GPU, and are
asked one kind after the other, all over HTTP; with `--gpus 0,0` all are on one, where only what one request at a time
sees (ttft, fetch) says something of two:
- ttft: time to the first token by length of the prompt, one request at a time: of one engine alone, and apart; their
  difference is what the transfer adds.
- fetch: a prompt whose beginning a peer holds, fetched and computed.
- gaps: between tokens of streams that decode while long prompts flood in, beside quiet ones.
- goodput: share of requests within both targets, by length of the prompts and by prompt tokens a second that arrive
  (Poisson); "break-even" is the least length from which apart keeps as many as unified.
- link: what the transfer adds where engines move only so many bytes a second (--kv-transfer-bandwidth); over TCP with
  UCX_TLS=tcp,cuda_copy, --parts link, --kv-transport nixl-host.
- trace: the same of the Mooncake trace (its requests that fit the context), by requests a second.
What each request saw is in the JSON, so that other targets can be applied. Unified: a request goes to the replica that
has the least to compute before its first token, what waits there and what is cached of the prompt counted in.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from common.budget import Budget
from common.engines import SMOKE_MODEL
from common.models import model_folder, vocabulary
from common.report import make_parser, percentile, print_table, save, say, words
from common.servers import Server, free_port, started
from routing.workload import MOONCAKE_BLOCK_TOKENS, TRACE_VARIABLE, Workload, find_mooncake, mooncake, token_ids

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
    load_lengths: tuple[int, ...] = (1024, 4096, 8192)
    loads: tuple[int, ...] = (12_000, 24_000, 36_000)
    """Prompt tokens a second, of both GPUs together."""
    load_s: float = 6.0
    output: int = 128
    trace_rates: tuple[float, ...] = (2.0, 4.0)
    trace_s: float = 25.0
    ttft_s: float = 0.5
    trace_ttft_s: float = 1.0
    """Its prompts are of up to 15,000 tokens, which take 0.4 s alone."""
    gap_s: float = 0.02
    """Of 95 % of a request's gaps between tokens."""
    links: tuple[int, ...] = (2_000_000_000, 3_300_000_000, 5_000_000_000)
    """Bytes a second of prefill engines."""
    chunk: int = 512
    """Largest prefill chunk of unified replicas: a pass of 1,024 tokens of a 7B shape takes longer than `gap_s`."""


_KV_BYTES = 28_000_000_000
"""Of each server where two are on each GPU."""
_CONTEXT = 15_900
"""Tokens of a request of the trace, at most."""
_SHARED_KV_BYTES = 8_000_000_000
"""Where all are on one."""
SMOKE = Work((64, 128), 2, 128, 2, 20, 2, 5.0, (128,), (300,), 1.0, 8, (2.0,), 1.0, 5.0, 5.0, 1.0, (10_000_000,), 64)


@dataclass(slots=True)
class Seen:
    """What one client saw."""

    first_s: float
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(when it ended, how long it was)."""


class Clients:
    """Streams of token-id prompts from one event loop."""

    def __init__(self, words_known: int) -> None:
        self._dice, self.known = random.Random(0), words_known

    def prompt(self, tokens: int) -> list[int]:
        """One that nobody has seen."""
        return [self._dice.randrange(3, self.known) for _ in range(tokens)]

    async def ask(
        self, session: aiohttp.ClientSession, url: str, prompt: list[int], output: int, headers: dict[str, str]
    ) -> Seen:
        """One request. RuntimeError: it is not answered with tokens."""
        return await stream(session, url, body_of(prompt, output), headers)


def body_of(prompt: list[int], output: int) -> bytes:
    """Of a request."""
    body = {"model": "measured", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    return json.dumps(body | {"stream": True}).encode()


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: dict[str, str],
    heard: Callable[[], None] = lambda: None,
) -> Seen:
    """See `Clients.ask`; `heard` is called at the first token."""
    begin, arrivals = time.perf_counter(), list[float]()
    json_headers = {"content-type": "application/json"} | headers
    async with session.post(url + "/v1/completions", data=body, headers=json_headers) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                if not arrivals:
                    heard()
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
    _turn: Iterator[int] = field(default_factory=itertools.count)
    _waiting: list[int] = field(default_factory=list)
    """Prompt tokens by server of requests without a first token."""
    _held: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting, self._held = [0] * len(self.urls), [set() for _ in self.urls]

    @property
    def url(self) -> str:
        """The next one's."""
        return self.urls[next(self._turn) % len(self.urls)]

    async def send(self, opened: aiohttp.ClientSession, arrival: Arrival) -> Seen:
        """To the server with the least to compute before its first token."""
        computed = [self._computed(number, arrival) for number in range(len(self.urls))]
        chosen = min(range(len(computed)), key=lambda number: self._waiting[number] + computed[number])
        self._waiting[chosen] += computed[chosen]
        self._held[chosen].update(arrival.blocks)

        def heard() -> None:
            self._waiting[chosen] -= computed[chosen]

        return await stream(opened, self.urls[chosen], arrival.body, self.headers, heard)

    def _computed(self, number: int, arrival: Arrival) -> int:
        held = sum(1 for _ in itertools.takewhile(self._held[number].__contains__, arrival.blocks))
        return arrival.prompt_tokens - held * MOONCAKE_BLOCK_TOKENS


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
    # To make a long prompt holds the event loop up for milliseconds, and streams would seem to wait.
    flooding = [body_of(clients.prompt(work.long_prompt), 2) for _ in range(work.floods)]
    streamed = iter([body_of(clients.prompt(64), work.stream_tokens) for _ in range(2 * work.streams)])
    async with session() as opened:

        async def flood() -> tuple[float, float]:
            begin = time.perf_counter()
            asked = []
            for body in flooding:
                asked.append(asyncio.create_task(stream(opened, fleet.url, body, fleet.headers)))
                await asyncio.sleep(1 / work.flood_per_s)
            await asyncio.gather(*asked)
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


def from_trace(trace: Workload, work: Work, rate: float, known: int, salt: str) -> list[Arrival]:
    """The beginning of the trace, at so many requests a second."""
    requests = trace.first(max(2, int(rate * work.trace_s))).at(work.trace_s).requests
    return [
        Arrival(
            one.arrival_s,
            body_of(token_ids(one, salt, trace.block_tokens, known), one.output_tokens),
            one.prompt_tokens,
            one.blocks,
        )
        for one in requests
    ]


async def replay(fleet: Fleet, arrivals: list[Arrival]) -> dict[str, list[float]]:
    """What each request saw: seconds to its first token, and the gap that 95 % of its gaps do not exceed."""
    async with session() as opened:
        asked, begin = [], time.perf_counter()
        for arrival in arrivals:
            await asyncio.sleep(arrival.at_s - (time.perf_counter() - begin))
            asked.append(asyncio.create_task(fleet.send(opened, arrival)))
        seen = await asyncio.gather(*asked)
    return {
        "ttft_s": [round(one.first_s, 4) for one in seen],
        "gap_p95_s": [round(percentile([gap for _, gap in one.gaps], 0.95), 5) if one.gaps else 0.0 for one in seen],
    }


def kept(seen: dict[str, list[float]], ttft_s: float, gap_s: float) -> float:
    """The share of requests within both targets."""
    pairs = list(zip(seen["ttft_s"], seen["gap_p95_s"], strict=True))
    return sum(first_s <= ttft_s and gap <= gap_s for first_s, gap in pairs) / len(pairs)


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
    for part, cells in (("goodput", grid(work)), ("trace", [(f"{rate:g}/s", rate) for rate in work.trace_rates])):
        for label, cell in cells if part in asked.parts else []:
            if not budget.allows(part, 20):
                continue
            if isinstance(cell, tuple):
                arrivals, ttft_s = poisson(clients, work, *cell), work.ttft_s
            elif asked.trace is None:
                continue
            else:
                arrivals, ttft_s = from_trace(asked.trace, work, cell, clients.known, name), work.trace_ttft_s
            with budget.spending(part):
                seen = asyncio.run(replay(fleet, arrivals))
            result[part].setdefault(name, {})[label] = seen
            good = kept(seen, ttft_s, work.gap_s)
            say(
                f"{name}, {part} {label}: {len(arrivals)} requests, {good:.0%} good, "
                f"ttft p50 {median(seen['ttft_s']):.3f} p99 {percentile(seen['ttft_s'], 0.99):.3f} s, "
                f"gaps {median(seen['gap_p95_s']) * 1e3:.1f} ms"
            )
            save(asked.out, result)
    save(asked.out, result)


def grid(work: Work) -> list[tuple[str, tuple[int, int]]]:
    """(label, (length, load)) of each cell."""
    return [(grid_label(length, load), (length, load)) for load in work.loads for length in work.load_lengths]


def show(result: dict[str, Any], work: Work) -> None:
    """Tables: what the transfer adds, shares of good requests, and the break-even length by load."""
    alone, split = result["ttft"].get("one engine", {}), result["ttft"].get("apart", {})
    rows = [
        [f"ttft {tokens}, ms", alone[tokens] * 1e3, split[tokens] * 1e3, (split[tokens] - alone[tokens]) * 1e3]
        for tokens in alone
        if tokens in split
    ]
    print_table(["", "one engine", "apart", "difference"], rows)
    if link := result.get("link"):
        alone, *others = link.values()
        rows = [
            [tokens, alone[tokens] * 1e3, *((one[tokens] - alone[tokens]) * 1e3 for one in others)] for tokens in alone
        ]
        print_table(["first token of, alone and added ms", *link], rows)
    print_table(["good share", *FLEETS], [[label, *shares] for label, shares in good_shares(result, work).items()])
    for load in work.loads:
        shares = good_shares(result, work)
        cells = [
            (length, cell) for length in work.load_lengths if (cell := shares.get(grid_label(length, load))) is not None
        ]
        if cells and all(None not in cell for _, cell in cells):
            from_length = next(
                (
                    length
                    for place, (length, _) in enumerate(cells)
                    if all(apart >= unified for _, (apart, unified) in cells[place:])
                ),
                None,
            )
            print(f"break-even at {load} prompt tokens a second: {from_length or 'at no length'}")


def plot(result: dict[str, Any], work: Work, path: Path) -> None:
    """Shares of good requests, a panel for each load and one for the trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = good_shares(result, work)
    loads = [load for load in work.loads if any(grid_label(length, load) in shares for length in work.load_lengths)]
    figure, panels = pyplot.subplots(1, len(loads) + 1, figsize=(4 * (len(loads) + 1), 3.5), sharey=True)
    for panel, load in zip(panels, [*loads, None], strict=True):
        if load is None:
            labels = [label for rate in work.trace_rates if (label := f"{rate:g}/s") in shares]
            names, title = labels, f"Mooncake trace, {work.trace_ttft_s:g} s and {work.gap_s * 1e3:g} ms"
        else:
            labels = [grid_label(length, load) for length in work.load_lengths]
            names = [f"{length:,}" for length in work.load_lengths]
            title = f"{load:,} prompt tokens/s, {work.ttft_s:g} s and {work.gap_s * 1e3:g} ms"
        for place, fleet in enumerate(FLEETS):
            heights = [shares.get(label, (None, None))[place] or 0 for label in labels]
            panel.bar([at + 0.4 * place for at in range(len(labels))], heights, width=0.4, label=fleet)
        panel.set_xticks([at + 0.2 for at in range(len(labels))], names)
        panel.set_title(title, fontsize=9)
    panels[0].set_ylabel("share of requests within both targets")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


FLEETS = ("apart", "two unified")


def grid_label(length: int, load: int) -> str:
    """A cell's."""
    return f"{length} tokens, {load} a second"


def good_shares(result: dict[str, Any], work: Work) -> dict[str, tuple[float | None, float | None]]:
    """By cell, of both fleets."""
    found: dict[str, tuple[float | None, float | None]] = {}
    for part, ttft_s in (("goodput", work.ttft_s), ("trace", work.trace_ttft_s)):
        apart, unified = (result[part].get(name, {}) for name in FLEETS)
        for label in dict.fromkeys([*apart, *unified]):
            one, other = (kept(seen[label], ttft_s, work.gap_s) if label in seen else None for seen in (apart, unified))
            found[label] = one, other
    return found


def main() -> None:
    """See the module."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument(
        "--parts", type=words, default=words("ttft,fetch,gaps,goodput,trace"), metavar="NAME,...", help="also link"
    )
    parser.add_argument("--gpus", type=words, default=["0", "1"], help="of prefill and decode")
    parser.add_argument("--kv-transport", default="auto")
    parser.add_argument(
        "--chunk", type=int, metavar="N", help="largest prefill chunk of unified replicas (default: 512)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of goodput")
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="measure nothing: show this result")
    asked = parser.parse_args()
    work = SMOKE if asked.smoke else Work()
    if asked.chunk:
        work = replace(work, chunk=asked.chunk)
    if asked.earlier:
        result = json.loads(asked.earlier.read_text())
    else:
        result = measured(asked, work, Budget(asked.time_limit_s))
    show(result, work)
    if asked.plot:
        plot(result, work, asked.plot)


def measured(asked: Any, work: Work, budget: Budget) -> dict[str, Any]:
    """Start the servers and ask both kinds."""
    result: dict[str, Any] = {"model": asked.model, "transport": asked.kv_transport, "gpus": asked.gpus}
    result |= {"ttft": {}, "fetch": {}, "gaps": {}, "goodput": {}, "trace": {}, "link": {}}
    settings: dict[str, Any] = {"kv_transport": asked.kv_transport}
    settings["kv_cache_memory"] = _KV_BYTES if len(set(asked.gpus)) == len(asked.gpus) else _SHARED_KV_BYTES
    asked.trace = trace_that_fits(asked.smoke) if "trace" in asked.parts else None
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        folder = model_folder(SMOKE_MODEL if asked.smoke else asked.model, Path(root))
        clients = Clients(vocabulary(folder))
        caches = Path(os.environ.get("CACHES", root)) / "caches"
        ports = [free_port(), free_port()]

        def start(gpu: str, more: dict[str, Any]) -> Server:
            return stack.enter_context(
                started("ours", folder, settings | more, caches, asked.smoke, of_gpu(gpu, asked.smoke))
            )

        pair = [
            start(gpu, {"role": role, "transfer_port": port})
            for role, port, gpu in zip(("prefill", "decode"), ports, asked.gpus, strict=True)
        ]
        unified_parts = {"gaps", "goodput", "trace"} & set(asked.parts)
        replicas = [start(gpu, {"long_prefill_token_threshold": work.chunk}) for gpu in asked.gpus if unified_parts]
        wait_for([*pair, *replicas], budget)
        say("all are ready")
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
        run_parts(apart, FLEETS[0], clients, work, asked, result, budget)
        result["metrics"] = [server.metrics("kv_transfer") for server in pair]
        if replicas:
            run_parts(Fleet([server.url for server in replicas], {}), FLEETS[1], clients, work, asked, result, budget)
        stack.pop_all().close()  # for the memory
        if "link" in asked.parts and budget.allows("link", 40):
            ports = [free_port() for _ in work.links]
            decode = start(asked.gpus[1], {"role": "decode", "transfer_port": free_port()})
            slow = [
                start(
                    asked.gpus[0],
                    {
                        "role": "prefill",
                        "transfer_port": port,
                        "kv_transfer_bandwidth": rate,
                        "kv_cache_memory": _SHARED_KV_BYTES,
                    },
                )
                for port, rate in zip(ports, work.links, strict=True)
            ]
            wait_for([decode, *slow], budget)
            for rate, port in zip([None, *work.links], [None, *ports], strict=True):
                headers = {} if port is None else {PREFILL_FROM: f"tcp://127.0.0.1:{port}"}
                fleet = Fleet([decode.url], headers)
                asyncio.run(ttft(fleet, clients, work, work.lengths[0]))
                found = result["link"].setdefault("alone" if rate is None else f"{rate / 1e9:g} GB/s", {})
                for tokens in work.lengths:
                    found[str(tokens)] = asyncio.run(ttft(fleet, clients, work, tokens))
                say(f"link: {result['link']}")
            result["link metrics"] = [
                decode.metrics("kv_transfer"),
                *(server.metrics("kv_transfer") for server in slow),
            ]
    save(asked.out, result)
    return result


def trace_that_fits(smoke: bool) -> Workload | None:
    """The Mooncake trace's requests that the context holds; of a smoke run, tiny ones. None: it is not here."""
    path = find_mooncake()
    if path is None:
        say(f"the trace is left out: {TRACE_VARIABLE} names no file of it")
        return None
    trace = mooncake(path)
    if smoke:
        requests = [replace(one, prompt_tokens=40, output_tokens=4, blocks=()) for one in trace.requests[:9]]
    else:
        requests = [one for one in trace.requests if one.prompt_tokens + one.output_tokens < _CONTEXT]
    return replace(trace, requests=tuple(requests))


if __name__ == "__main__":
    main()
