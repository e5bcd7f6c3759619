"""Several engines behind one port, beside one engine, and beside as many servers behind the gateway.

    python benchmarks/data_parallel.py --model qwen2.5-7b --size 2 --out FILE

Chats that grow, some at once: each turn's prompt is the one before it and some more. Tokens a second of prompts and
outputs, time to the first token, and the share of prompt tokens that was found in a prefix cache.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from common.budget import Budget
from common.engines import SMOKE_MODEL
from common.models import model_folder, vocabulary
from common.report import log_line, make_parser, percentile, print_table, save
from common.servers import free_port, started

FLEETS = ("one engine", "one port", "gateway")


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of a fleet."""

    chats: int = 128
    turns: int = 5
    first_tokens: int = 1024
    more_tokens: int = 200
    output: int = 150
    at_once: int = 64


ON_A_CPU = Work(16, 4, 192, 48, 24, 8)
SMOKE = Work(4, 2, 40, 20, 4, 4)


@dataclass(slots=True)
class Seen:
    """By all clients."""

    first_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def figures(self, took_s: float) -> dict[str, float]:
        """What is told."""
        return {
            "tok_s": (self.prompt_tokens + self.output_tokens) / took_s,
            "ttft p50": median(self.first_s),
            "ttft p99": percentile(self.first_s, 0.99),
            "hits": self.cached_tokens / self.prompt_tokens,
        }


async def turn(session: aiohttp.ClientSession, url: str, prompt: list[int], output: int, seen: Seen) -> None:
    """One request. RuntimeError: it is not answered as it should be."""
    body = {"model": "measured", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    begin, first_s, usage = time.perf_counter(), None, None
    async with session.post(url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or time.perf_counter() - begin
            usage = json.loads(line[6:]).get("usage") or usage
    if first_s is None or usage is None:
        raise RuntimeError("a stream without tokens")
    seen.first_s.append(first_s)
    seen.prompt_tokens += usage["prompt_tokens"]
    seen.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    seen.output_tokens += usage["completion_tokens"]


async def converse(url: str, work: Work, vocabulary_size: int) -> dict[str, float]:
    """All chats, each turn after the one before it; the same for every fleet."""
    dice, seen, slots = random.Random(0), Seen(), asyncio.Semaphore(work.at_once)
    lengths = [work.first_tokens + work.more_tokens * number for number in range(work.turns)]
    whole = [[dice.randrange(3, vocabulary_size) for _ in range(lengths[-1])] for _ in range(work.chats)]

    async def chat(tokens: list[int]) -> None:
        for length in lengths:
            async with slots:
                await turn(session, url, tokens[:length], work.output, seen)

    timeout, connector = aiohttp.ClientTimeout(600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        begin = time.perf_counter()
        await asyncio.gather(*map(chat, whole))
        return seen.figures(time.perf_counter() - begin)


@contextmanager
def gateway(urls: list[str], ports: list[tuple[int, int]], root: Path) -> Iterator[str]:
    """The address of one over these servers, ready."""
    endpoints = [
        {"name": f"e{number}", "url": url, "model": "measured"}
        | {"events": f"tcp://127.0.0.1:{published[0]}", "replay": f"tcp://127.0.0.1:{published[1]}"}
        for number, (url, published) in enumerate(zip(urls, ports, strict=True))
    ]
    file, port = root / "endpoints.json", free_port()
    file.write_text(json.dumps({"endpoints": endpoints}))
    command = [sys.executable, "-m", "mini_infer_gateway", "--endpoints", str(file), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                with urllib.request.urlopen(url + "/readyz", timeout=5):
                    break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def fleet(name: str, folder: str, size: int, on_cpu: bool, smoke: bool, root: Path, limit_s: float) -> Iterator[str]:
    """The address at which requests are answered."""
    caches = Path(os.environ.get("CACHES", root)) / "caches"
    settings: dict[str, Any] = {"device": "cpu"} if on_cpu else {}
    with ExitStack() as stack:
        if name != "gateway":
            sizes = settings | ({"data_parallel_size": size} if name == "one port" else {})
            server = stack.enter_context(started("ours", folder, sizes, caches, smoke, _threads(size, on_cpu)))
            server.first_token(limit_s)
            yield server.url
            return
        ports = [(free_port(), free_port()) for _ in range(size)]
        servers = []
        for number, (events, replay) in enumerate(ports):
            variables = _threads(size, on_cpu) | ({} if on_cpu else {"CUDA_VISIBLE_DEVICES": str(number)})
            flags = settings | {"events_port": events, "replay_port": replay}
            servers.append(stack.enter_context(started("ours", folder, flags, caches, smoke, variables)))
        for server in servers:
            server.first_token(limit_s)
        yield stack.enter_context(gateway([server.url for server in servers], ports, root))


def _threads(size: int, on_cpu: bool) -> dict[str, str]:
    """Every engine of every fleet gets as many: its share of the machine."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size))} if on_cpu else {}


def main() -> None:
    """See the module."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen2.5-7b", help='of common/models.py, or "demo"')
    parser.add_argument("--size", type=int, default=2, help="engines")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, whose cores the engines divide, and less work")
    options = parser.parse_args()
    budget, on_cpu = Budget(options.time_limit_s), options.cpu or options.smoke
    work = SMOKE if options.smoke else ON_A_CPU if options.cpu else Work()
    found: dict[str, dict[str, float]] = {}
    result: dict[str, Any] = {"model": options.model, "size": options.size, "fleets": found}
    with tempfile.TemporaryDirectory() as root:
        name = SMOKE_MODEL if options.smoke else options.model
        folder = "demo" if name == "demo" else model_folder(name, Path(root))
        vocabulary_size = 4000 if name == "demo" else vocabulary(folder)
        for kind in FLEETS:
            if not budget.allows("fleet", 60):
                continue
            with (
                budget.spending("fleet"),
                fleet(kind, folder, options.size, on_cpu, options.smoke, Path(root), min(budget.left_s, 400)) as url,
            ):
                log_line(f"{kind}: ready")
                found[kind] = asyncio.run(converse(url, work, vocabulary_size))
            log_line(f"{kind}: {found[kind]}")
            save(options.out, result)
    save(options.out, result)
    figures = ("tok_s", "ttft p50", "ttft p99", "hits")
    print_table(["", *figures], [[kind, *(found[kind][figure] for figure in figures)] for kind in found])


if __name__ == "__main__":
    main()
