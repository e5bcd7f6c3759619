"""Routing policies before real engines: several on one GPU, the Mooncake trace, and whether the simulator orders alike.

    python benchmarks/routing_engines.py --model qwen3-0.6b --engines 4 --loads 0.8,1.3 --out FILE

Engines share the GPU; each keeps the same number of tokens. The trace is brought to their size: a block of 512 tokens
becomes one of 128, prompts and answers shrink alike. Our gateway routes from the engines' own events; the other
policies, re-told from their documents, are followed by the client itself, which asks the chosen engine directly and
so pays for no router. A load of 1.0 is the rate at which the gateway answered all requests when they came at once;
every run has token ids of its own, so that nothing is cached from the one before. The same requests then go through
the simulator.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the simulator

from common.budget import Budget
from common.engines import MEMORY_SHARE, SMOKE_MODEL
from common.models import model_folder, vocabulary
from common.report import log_line, make_parser, print_table, save, words
from common.servers import free_port, started
from data_parallel import gateway

from benchmarks.routing import grid
from benchmarks.routing.figures import quantile
from benchmarks.routing.mirror import MirroredEngine, MirroredFleet, MirroredShape
from benchmarks.routing.our_gateway import Keys
from benchmarks.routing.references.base import Policy, View
from benchmarks.routing.workload import (
    SimulatedRequest,
    Workload,
    find_mooncake,
    mooncake,
    token_ids,
    zero_reuse,
)

JSON = {"content-type": "application/json"}
OURS = grid.OURS
POLICIES = (OURS, "llm-d", "sglang", "least-loaded", "round-robin")
DIFFERENT = 1.1
"""Two policies have an order where their times differ by more than this factor."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is asked, and of what size."""

    requests: int
    block_tokens: int
    kv_tokens: int
    context_tokens: int


GPU = Scale(800, 128, 125_000, 32_000)
SMOKE = Scale(24, 16, 4_000, 500)


@dataclass(slots=True)
class Answered:
    """One request's."""

    first_s: float
    end_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks: of which engines, and in whose tokens."""

    session: aiohttp.ClientSession
    engines: Sequence[str]
    gateway: str
    vocabulary_size: int
    scale: Scale

    def body(self, request: SimulatedRequest, salt: str) -> bytes:
        """What is sent."""
        body = {"model": "measured", "prompt": token_ids(request, salt, self.scale.block_tokens, self.vocabulary_size)}
        body |= {"max_tokens": request.output_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body).encode()

    async def request(self, url: str, body: bytes, on_first_token: Callable[[], None]) -> Answered:
        """One streamed completion; `on_first_token` is called at its first token. RuntimeError: it is not as it should
        be.
        """
        begin_s, first_s, usage = time.perf_counter(), 0.0, None
        async with self.session.post(url + "/v1/completions", data=body, headers=JSON) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    if not first_s:
                        first_s = time.perf_counter()
                        on_first_token()
                    if b'"choices":[]' in line:
                        usage = json.loads(line[6:])["usage"]
        if not first_s or usage is None:
            raise RuntimeError("a stream without tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        end_s = time.perf_counter()
        return Answered(first_s - begin_s, end_s, usage["completion_tokens"], usage["prompt_tokens"], cached)

    async def run(self, workload: Workload, policy: str, salt: str) -> dict[str, float]:
        """All requests at their times, by this policy."""
        shape = MirroredShape(self.scale.kv_tokens // self.scale.block_tokens, self.scale.block_tokens)
        mirrored = [MirroredEngine(shape) for _ in self.engines]
        view = View(MirroredFleet(shape, mirrored), exact=True)
        rule: Policy | None = None if policy == OURS else grid.REFERENCES[policy]()
        bodies = [self.body(request, salt) for request in workload.requests]
        start_s = time.perf_counter()

        async def one(request: SimulatedRequest, body: bytes) -> Answered:
            await asyncio.sleep(start_s + request.arrival_s - time.perf_counter())
            if rule is None:
                return await self.request(self.gateway, body, lambda: None)
            number = rule.choose(request, view)
            view.note(request, number)
            flight = mirrored[number].sent(request)
            try:
                return await self.request(self.engines[number], body, lambda: mirrored[number].first_token(flight))
            finally:
                mirrored[number].finished(flight)
                view.ended(request, number)

        answers = await asyncio.gather(*map(one, workload.requests, bodies))
        first = sorted(answer.first_s for answer in answers)
        took_s = max(answer.end_s for answer in answers) - start_s
        return {
            "ttft_mean_s": sum(first) / len(first),
            "ttft_p50_s": quantile(first, 0.5),
            "ttft_p90_s": quantile(first, 0.9),
            "output_tokens_s": sum(answer.output_tokens for answer in answers) / took_s,
            "hit_share": sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers),
            "took_s": took_s,
        }


def scaled(workload: Workload, scale: Scale) -> Workload:
    """With blocks of fewer tokens, and without what no context holds."""
    factor = scale.block_tokens / workload.block_tokens
    requests = (
        replace(
            request,
            prompt_tokens=max(1, int(request.prompt_tokens * factor)),
            output_tokens=max(1, int(request.output_tokens * factor)),
        )
        for request in workload.requests
    )
    fitting = (one for one in requests if one.prompt_tokens + one.output_tokens < scale.context_tokens)
    return Workload(workload.name, scale.block_tokens, tuple(replace(one, number=n) for n, one in enumerate(fitting)))


@contextmanager
def fleet(folder: str, options: Any, scale: Scale, root: Path, limit_s: float) -> Iterator[tuple[list[str], str]]:
    """Addresses of all engines, and of the gateway in front of them."""
    settings: dict[str, Any] = {"gpu_memory_utilization": MEMORY_SHARE / options.engines}
    if not options.smoke:
        config = json.loads((Path(folder) / "config.json").read_text())
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        token_bytes = 4 * head * config["num_key_value_heads"] * config["num_hidden_layers"]
        settings |= {"kv_cache_memory": scale.kv_tokens * token_bytes, "max_model_len": scale.context_tokens}
    ports = [(free_port(), free_port()) for _ in range(options.engines)]
    with ExitStack() as stack:
        servers = []
        for number, (events, replay) in enumerate(ports):
            flags = settings | {"events_port": events, "replay_port": replay}
            caches = Path(os.environ.get("CACHES", root)) / "caches" / options.model
            variables = {"OMP_NUM_THREADS": "1"} if options.smoke else {}
            server = stack.enter_context(started("ours", folder, flags, caches, options.smoke, variables))
            servers.append(server)
            if number == 0 and not options.smoke:
                server.first_token(limit_s)  # it compiles for all
        for server in servers:
            server.first_token(limit_s)
        urls = [server.url for server in servers]
        yield urls, stack.enter_context(gateway(urls, ports, root))


async def measure(client: Client, workload: Workload, options: Any, budget: Budget, result: dict[str, Any]) -> None:
    """Finds the rate of a load of 1.0, then has every policy at every load."""
    # Twice: what the gateway learns of engines' rates in the first seconds is no part of what is measured.
    for salt in ("to learn", "all at once"):
        found = await client.run(workload.at(1e-3), OURS, salt)
    whole_s = result["whole_s"] = found["took_s"]
    log_line(f"{len(workload.requests)} requests at once: {found}")
    for load in options.loads:
        for policy in options.policies:
            if not budget.allows("run", 2 * whole_s):
                continue
            with budget.spending("run"):
                figures = await client.run(workload.at(whole_s / load), policy, f"{load} {policy}")
            log_line(f"load {load:g}, {policy}: {figures}")
            result["runs"].append({"load": load, "policy": policy} | figures)
            save(options.out, result)


def simulated(workload: Workload, options: Any, scale: Scale) -> list[dict[str, Any]]:
    """The same situations in the simulator, whose engines are larger as the trace's blocks are."""
    cache_tokens = scale.kv_tokens * workload.block_tokens // scale.block_tokens
    return [
        {"load": load, "policy": found.policy, "ttft_p90_s": found.figures.ttft_p90_s}
        for load in options.loads
        for found in grid.run_cell(
            grid.Cell("mooncake", options.engines, cache_tokens, load), workload, options.policies, Keys()
        )
    ]


def disagreements(real: Sequence[dict[str, Any]], modelled: Sequence[dict[str, Any]]) -> list[str]:
    """Pairs of policies that engines and simulator order differently, both by more than DIFFERENT."""
    times = [{(row["load"], row["policy"]): row["ttft_p90_s"] for row in rows} for rows in (real, modelled)]
    wrong = []
    for one, other in combinations(times[0], 2):
        if one[0] == other[0] and times[1].keys() >= {one, other}:
            ratios = [which[one] / which[other] for which in times]
            if max(ratios) > DIFFERENT and min(ratios) < 1 / DIFFERENT:
                ratios_text = f"{ratios[0]:.2f} by engines, {ratios[1]:.2f} by the simulator"
                wrong.append(f"load {one[0]:g}, {one[1]} over {other[1]}: {ratios_text}")
    return wrong


def main() -> None:
    """See the module."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", help="of common/models.py")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, help=f"the trace's first (default: {GPU.requests})")
    parser.add_argument("--loads", type=lambda text: [float(part) for part in words(text)], default=[0.8, 1.3])
    parser.add_argument("--policies", type=words, default=list(POLICIES), help="of: " + ",".join(POLICIES))
    parser.add_argument("--trace", metavar="FILE", help="see python -m benchmarks.routing --help")
    options = parser.parse_args()
    scale, trace, budget = SMOKE if options.smoke else GPU, find_mooncake(options.trace), Budget(options.time_limit_s)
    count = options.requests or scale.requests
    if trace is None and not options.smoke:
        raise SystemExit("the recorded trace is not here: see python -m benchmarks.routing --help")
    whole = mooncake(trace, count) if trace else zero_reuse(count)
    workload = scaled(whole, scale)
    result: dict[str, Any] = {"model": options.model, "engines": options.engines, "requests": len(workload.requests)}
    result |= {"block_tokens": scale.block_tokens, "kv_tokens": scale.kv_tokens, "runs": [], "simulated": []}
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(SMOKE_MODEL if options.smoke else options.model, Path(root))
        with fleet(folder, options, scale, Path(root), min(budget.left_s, 300)) as (urls, through):
            log_line(f"{len(urls)} engines are ready")
            asyncio.run(all_runs(urls, through, vocabulary(folder), scale, workload, options, budget, result))
    result["simulated"] = simulated(whole, options, scale)
    result["disagreements"] = disagreements(result["runs"], result["simulated"])
    save(options.out, result)
    modelled = {(row["load"], row["policy"]): row["ttft_p90_s"] for row in result["simulated"]}
    figures = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "output_tokens_s", "hit_share")
    rows = [
        [f"{row['load']:g}", row["policy"], *(row[name] for name in figures), modelled[row["load"], row["policy"]]]
        for row in result["runs"]
    ]
    print_table(["load", "policy", *figures, "simulated p90"], rows)
    print("\n".join(["", f"{len(result['disagreements'])} pairs in another order", *result["disagreements"]]))


async def all_runs(
    urls: Sequence[str],
    through: str,
    vocabulary_size: int,
    scale: Scale,
    workload: Workload,
    options: Any,
    budget: Budget,
    result: dict[str, Any],
) -> None:
    """Everything that is asked of real engines."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        client = Client(session, urls, through, vocabulary_size, scale)
        await measure(client, workload, options, budget, result)


if __name__ == "__main__":
    main()
