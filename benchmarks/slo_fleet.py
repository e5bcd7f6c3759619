"""How many admitted requests meet their latency targets above a fleet's capacity: engines on CPUs behind the gateway.

    python benchmarks/slo_fleet.py --engines 2 --out FILE

The load, the targets and the figures are those of slo_scheduling.py; here each request is a streamed completion that
the gateway routes, and a refusal is a 429. Capacity is what the fleet serves when all requests come at once. Engines
of one policy run at a time. A client sends each request at its time, whether or not earlier ones have ended.
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from common.budget import Budget
from common.engines import SMOKE_MODEL
from common.models import model_folder, vocabulary
from common.report import log_line, make_parser, save
from common.servers import free_port, started
from data_parallel import gateway
from slo_scheduling import KINDS, POLICIES, SMOKE, Clock, Load, Sent, arrivals, at_once, figures, sent_of, show

from mini_infer_engine.core.request import LatencyTargets

FLEET = Load(
    seconds=40,
    chat_prompt=200,
    chat_output=120,
    doc_prompt=4000,
    doc_output=80,
    probes=64,
    max_num_seqs=16,
    chat_ttft_ms=1000,
    doc_ttft_ms=3000,
    itl_ms=40,
)
"""A load for two CPU cores; `max_num_seqs` is of each engine."""
CLOCK = Clock()
_DOC_TTFT, _CHAT_TTFT, _INTERVAL = 8.0, 4.0, 3.0
"""Targets as multiples: of a document's time to its first token alone, and of a busy fleet's token interval."""


@contextmanager
def fleet(policy: str, load: Load, folder: str, size: int, root: Path, limit_s: float) -> Iterator[str]:
    """Yields the address of a gateway over `size` engines that schedule by this policy."""
    settings = {
        "device": "cpu",
        "scheduling_policy": policy,
        "max_num_seqs": load.max_num_seqs,
        "max_model_len": load.doc_prompt + load.doc_output + 1,
        "kv_cache_memory": 1 << 28,
    }
    ports = [(free_port(), free_port()) for _ in range(size)]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                started(
                    "ours",
                    folder,
                    settings | {"dtype": "float32", "events_port": events, "replay_port": replay},
                    root / "caches",
                    variables={"OMP_NUM_THREADS": "1"},
                )
            )
            for events, replay in ports
        ]
        for server in servers:
            server.first_token(limit_s)
        yield stack.enter_context(gateway([server.url for server in servers], ports, root))


def body(one: Sent) -> bytes:
    """Returns the request as a streamed completion for exactly its number of tokens."""
    sampling, targets = one.request.sampling, one.request.targets
    fields = {
        "model": "measured",
        "prompt": one.request.prompt_token_ids,
        "max_tokens": sampling.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "ttft_ms": targets.ttft_ms,
        "itl_ms": targets.itl_ms,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


async def send(session: aiohttp.ClientSession, url: str, one: Sent, sent: bytes) -> None:
    """Sends one request at its time and notes what became of it.

    Raises:
        RuntimeError: The answer is neither a stream of tokens nor a refusal.

    """
    await asyncio.sleep(one.due_s - time.monotonic())
    headers = {"content-type": "application/json"}
    async with session.post(url + "/v1/completions", data=sent, headers=headers) as response:
        if response.status == 429:
            one.refused_s = time.monotonic()
            return
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                one.last_s = time.monotonic()
                one.first_s = one.first_s or one.last_s
                one.num_tokens += 1
    if not one.num_tokens:
        raise RuntimeError("a stream without tokens")
    one.num_tokens = one.request.sampling.max_tokens  # a chunk may carry several tokens


def run(url: str, requests: Sequence[Sent]) -> Sequence[Sent]:
    """Sends all requests and returns them with their times."""
    bodies = [body(one) for one in requests]

    async def all_of_them() -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            await asyncio.gather(*(send(session, url, *pair) for pair in zip(requests, bodies, strict=True)))

    asyncio.run(all_of_them())
    return requests


def capacity(url: str, load: Load, size: int) -> dict[str, Any]:
    """Returns what the fleet serves all at once, and targets that follow from its times when idle and when full."""
    run(url, at_once(load, 1, CLOCK))
    served = run(url, at_once(load, 2, CLOCK))
    alone_s = median(
        run(url, [sent_of(load, "doc", random.Random(number), CLOCK.monotonic(), "alone")])[0].ttft_s
        for number in range(3, 6)
    )
    dice, now_s = random.Random(9), CLOCK.monotonic()
    full = run(url, [sent_of(load, "chat", dice, now_s, f"r{index}") for index in range(size * load.max_num_seqs)])
    interval_ms = 1000 * median(one.itl_s for one in full)
    return {
        "requests/s": len(served) / (max(one.last_s for one in served) - served[0].due_s),
        "document alone, ttft ms": 1000 * alone_s,
        "full batch, interval ms": interval_ms,
        "chat ttft ms": load.chat_ttft_ms or 1000 * _CHAT_TTFT * alone_s,
        "doc ttft ms": load.doc_ttft_ms or 1000 * _DOC_TTFT * alone_s,
        "itl ms": load.itl_ms or _INTERVAL * interval_ms,
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--engines", type=int, default=2, metavar="N")
    for name, default in asdict(FLEET).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    load = SMOKE if options.smoke else Load(**{name: getattr(options, name) for name in asdict(FLEET)})
    found: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"load": asdict(load), "engines": options.engines, "policies": found}
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(SMOKE_MODEL, Path(root))
        load = replace(load, vocabulary=vocabulary(folder, load.vocabulary))
        for policy in POLICIES:
            with fleet(policy, load, folder, options.engines, Path(root), budget.left_s) as url:
                if "capacity" in found:
                    run(url, at_once(load, 1, CLOCK))
                else:
                    found["capacity"] = capacity(url, load, options.engines)
                known = found["capacity"]
                targets = {
                    kind: LatencyTargets(ttft_ms=known[f"{kind} ttft ms"], itl_ms=known["itl ms"]) for kind in KINDS
                }
                found[policy] = figures(run(url, arrivals(load, load.load * known["requests/s"], targets, CLOCK)))
            log_line(f"  {policy}: {found[policy]['admitted']} admitted, {found[policy]['refused']} refused")
            save(options.out, result)
    show(f"{options.engines} engines", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
