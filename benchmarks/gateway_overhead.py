"""What a router costs and adds: ours beside smg, sglang-router and vllm-router, in one run, on this machine.

`python benchmarks/gateway_overhead.py [--json FILE] [--rounds N] [--routers ours,smg] [--loads small,...] [--quick]`

Every router stands before two endpoints that think of nothing, on loopback; texts are unique, and ours tokenises them
with a real vocabulary of 150,000 tokens. CPU is user and system time of the router's process, from /proc. Peers come
from PyPI, each into an environment of its own under --cache. Only ratios within one run say anything: routers take
turns, figures are medians over rounds, and the endpoints asked directly show what the clients themselves cost.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from zlib import crc32

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the benchmarks' own modules

from benchmarks.gateway_load import client, routers, vocabulary
from benchmarks.gateway_load.client import Answer, Target
from benchmarks.gateway_load.endpoint import CHUNKS

COMMON = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people
""".split()  # noqa: SIM905 - a list of a hundred words in quotes cannot be read
Figures = dict[str, float]


@dataclass(frozen=True)
class Scale:
    """How much is sent."""

    small: int = 4000
    seconds: float = 8.0
    streams: int = 128
    turns: int = 48
    long: int = 6


class Texts:
    """Unique texts of common and of rare words."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._rare = ["".join(self._dice.choices("etaoinshrdlucmfwypvbgk", k=7)) for _ in range(3000)]

    def words(self, count: int) -> str:
        """That many."""
        dice = self._dice
        return " ".join(dice.choice(COMMON) if dice.random() < 0.8 else dice.choice(self._rare) for _ in range(count))

    def small(self, count: int, stream: bool = False) -> list[bytes]:
        """Bodies of one message of 50 words."""
        return [client.chat([("user", self.words(50))], stream) for _ in range(count)]

    def chat(self, words: int, messages: int) -> list[tuple[str, str]]:
        """One of that many words in all, the last message an assistant's."""
        return client.alternating(iter(self.words(words // messages) for _ in range(messages)))


async def measured(router: routers.Running | None, work: Awaitable[list[Answer]], parts: int = 1) -> Figures:
    """CPU an answer (or part of one), and latencies."""
    before, began_s = router.cpu_s() if router else 0.0, time.perf_counter()
    answers = await work
    took_s = time.perf_counter() - began_s
    spent_s = router.cpu_s() - before if router else 0.0
    failed = sum(answer.status != 200 for answer in answers)
    first = sorted(1e3 * answer.first_byte_s for answer in answers)
    figures = {"first_ms_p50": first[len(first) // 2], "first_ms_p99": first[int(0.99 * (len(first) - 1))]}
    figures |= {"a_second": len(answers) / took_s, "failed": float(failed)}
    if router:
        figures["cpu_ms"] = 1e3 * spent_s / len(answers) / parts
    return figures


async def small_at_saturation(target: Target, router: routers.Running | None, texts: Texts, scale: Scale) -> Figures:
    return await measured(router, client.closed_loop(target, texts.small(scale.small), 64))


async def small_at_a_rate(
    rate: float, target: Target, router: routers.Running | None, texts: Texts, scale: Scale
) -> Figures:
    return await measured(router, client.open_loop(target, texts.small(int(rate * scale.seconds)), rate))


async def streams(target: Target, router: routers.Running | None, texts: Texts, scale: Scale) -> Figures:
    """CPU is per chunk, its share of the request included."""
    return await measured(router, client.closed_loop(target, texts.small(scale.streams, True), 64), CHUNKS)


async def growing(
    words: int, messages: int, target: Target, router: routers.Running | None, texts: Texts, scale: Scale
) -> Figures:
    """A chat that gets an answer and a question each time; the first request is not counted."""
    chat = [*texts.chat(words, messages), ("user", texts.words(30))]
    await client.closed_loop(target, [client.chat(chat)], 1)
    bodies = []
    for _ in range(scale.turns):
        chat += [("assistant", texts.words(100)), ("user", texts.words(30))]
        bodies.append(client.chat(chat))
    return await measured(router, client.closed_loop(target, bodies, 1))


async def new_last_message(
    words: int, messages: int, target: Target, router: routers.Running | None, texts: Texts, scale: Scale
) -> Figures:
    """The same chat with another last message each time; the first request is not counted."""
    chat = texts.chat(words, messages)
    bodies = [client.chat([*chat, ("user", texts.words(30))]) for _ in range(scale.turns + 1)]
    await client.closed_loop(target, bodies[:1], 1)
    return await measured(router, client.closed_loop(target, bodies[1:], 1))


async def cold(words: int, target: Target, router: routers.Running | None, texts: Texts, scale: Scale) -> Figures:
    """Long prompts that were never seen."""
    bodies = [client.chat([("user", texts.words(words))]) for _ in range(scale.long)]
    return await measured(router, client.closed_loop(target, bodies, 1))


async def beside_long(target: Target, router: routers.Running | None, texts: Texts, scale: Scale) -> Figures:
    """50 small requests a second beside two clients with new prompts of about 100,000 tokens."""
    long = [client.chat([("user", texts.words(75_000))]) for _ in range(4 * scale.long)]
    left = iter(long * 50)

    async def two() -> None:
        await asyncio.gather(client.request(target, next(left)), client.request(target, next(left)))

    small = texts.small(int(50 * scale.seconds))
    return await measured(router, client.beside(two, client.open_loop(target, small, 50)))


async def beside_largest(target: Target, router: routers.Running | None, texts: Texts, scale: Scale) -> Figures:
    """50 small requests a second beside a client with bodies of just under 16 MiB."""
    word = texts.words(20_000)
    body = client.chat([("user", (word * (16 << 20 // len(word) + 1))[: (16 << 20) - 200])])

    async def one() -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await client.request(target, body)

    small = texts.small(int(50 * scale.seconds))
    return await measured(router, client.beside(one, client.open_loop(target, small, 50)))


Load = Callable[[Target, routers.Running | None, Texts, Scale], Awaitable[Figures]]
LOADS: dict[str, Load] = {
    "small, 64 connections": small_at_saturation,
    "small, 300 a second": partial(small_at_a_rate, 300.0),
    "small, 50 a second": partial(small_at_a_rate, 50.0),
    "64 streams, a chunk": streams,
    "growing chat, 30k tokens": partial(growing, 20_000, 20),
    "100k words, new last message": partial(new_last_message, 100_000, 40),
    "cold, 100k words": partial(cold, 100_000),
    "small beside 100k-token prompts": beside_long,
    "small beside 16 MiB bodies": beside_largest,
}
SHOWN = ("cpu_ms", "first_ms_p50", "first_ms_p99", "a_second", "failed")


async def run(options: argparse.Namespace) -> dict[str, dict[str, list[Figures]]]:
    """All rounds: load -> router -> figures of each round."""
    found: dict[str, dict[str, list[Figures]]] = {load: {} for load in options.loads}
    scale = Scale(400, 2.0, 64, 6, 2) if options.quick else Scale()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoints = []
        for number in range(2):
            port = routers.free_port()
            command = [sys.executable, str(Path(__file__).with_name("gateway_load") / "endpoint.py"), str(port), "m"]
            command.append(str(vocabulary.assets_file(options.cache)))
            log = folder / f"endpoint-{number}.log"
            endpoints.append(await stack.enter_async_context(routers.running("endpoint", command, port, log, b"")))
        urls = [f"http://127.0.0.1:{endpoint.port}" for endpoint in endpoints]
        targets: dict[str, tuple[Target, routers.Running | None]] = {"direct": (Target(endpoints[0].port), None)}
        ready = client.chat([("user", "hi")])
        for name in options.routers:
            if make := _command(name, options.cache):
                port = routers.free_port()
                command = make(port, urls, folder)
                process = routers.running(name, command, port, folder / f"{name}.log", ready)
                router = await stack.enter_async_context(process)
                targets[name] = Target(port), router
        await asyncio.sleep(3.0)  # for ours to build the tokenizer, which other requests need not wait for
        for number in range(options.rounds):
            for load in options.loads:
                for name, (target, router) in targets.items():
                    figures = await LOADS[load](target, router, Texts(crc32(f"{number} {load}".encode())), scale)
                    found[load].setdefault(name, []).append(figures)
                    print(number, load, name, {key: round(value, 3) for key, value in figures.items()}, flush=True)
        memory = {name: router.memory_mb("VmHWM") for name, (_, router) in targets.items() if router}
        found["peak memory, MB"] = {name: [{"memory_mb": peak}] for name, peak in memory.items()}
    return found


def _command(name: str, cache: Path) -> Callable[[int, Sequence[str], Path], list[str]] | None:
    if name == "ours":
        return routers.our_command
    bin_folder = routers.environment(name, cache)
    if bin_folder is None:
        print(f"{name} cannot be installed here: left out")
        return None
    return routers.peer_command(name, bin_folder)


def medians(found: dict[str, dict[str, list[Figures]]]) -> dict[str, dict[str, Figures]]:
    """Over rounds; the worst of failures."""
    return {
        load: {
            name: {key: median(one[key] for one in rounds) for key in rounds[0]} for name, rounds in by_router.items()
        }
        for load, by_router in found.items()
    }


def table(result: dict[str, dict[str, Figures]]) -> str:
    """Markdown: a line a load and router, with the ratio of CPU to smg's."""
    lines = ["| load | router | CPU ms | of smg's | first byte p50, ms | p99 | a second | failed |", "|---" * 8 + "|"]
    for load, by_router in result.items():
        for name, figures in by_router.items():
            if "memory_mb" in figures:
                lines.append(f"| {load} | {name} | {figures['memory_mb']:.0f} MB | | | | | |")
                continue
            cpu, peer = figures.get("cpu_ms"), by_router.get("smg", {}).get("cpu_ms")
            cells = [f"{cpu:.3f}" if cpu is not None else "", f"{cpu / peer:.2f}" if cpu is not None and peer else ""]
            cells += [f"{figures[key]:.2f}" for key in SHOWN[1:3]] + [f"{figures[key]:.0f}" for key in SHOWN[3:]]
            lines.append(f"| {load} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="what was found, with where and when")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--routers", type=lambda text: text.split(","), default=["ours", *routers.PEERS])
    parser.add_argument("--loads", type=lambda text: text.split(";"), default=list(LOADS), metavar="A;B")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "mini-infer-benchmarks")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests: whether it runs, not how fast")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    began = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    result = medians(uvloop.run(run(options)))
    print(table(result))
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
        where = {"date": began, "commit": commit.stdout.strip(), "machine": machine, "command": " ".join(sys.argv)}
        options.json.write_text(json.dumps(where | {"medians": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
