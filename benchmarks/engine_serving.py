"""Rates against latency over HTTP: real sockets, a client on the same machine, token-id prompts, streamed answers.

    python benchmarks/engine_serving.py --servers ours,vllm --models qwen2.5-7b --rates 4,8,16,32 --out FILE
    python benchmarks/engine_serving.py --url http://127.0.0.1:8080 --served-model-name NAME

One client alone (time to the first token, gaps), closed loops (all clients at once, one request each), then open ones
(Poisson arrivals at each rate). Token counts are asserted from the server's usage. Servers run in turns.
"""

import argparse
import asyncio
import contextlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import engines, servers
from common.http_load import Client, make_session
from common.models import model_folder
from common.report import print_table, save, say

_COLUMNS = ("tok_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")


async def measure(client: Client, options: argparse.Namespace, note: Callable[[str, dict[str, Any]], None]) -> None:
    """All loads against one server."""
    dice = random.Random(1)
    async with make_session() as session:
        warm = Client(client.url, client.vocabulary, max(1, client.prompt_tokens // 4), 8, client.model)
        await warm.closed(session, 8, dice)
        note("one client", await client.single(session, options.tries, dice))
        for clients in options.clients:
            note(f"{clients} clients", await client.closed(session, clients, dice))
        for rate in options.rates:
            requests = max(4, int(rate * options.seconds))
            note(f"{rate:g} requests/s", await client.opened(session, rate, requests, dice))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="ours,vllm", metavar="NAME,...")
    parser.add_argument("--models", default="qwen2.5-7b,qwen3-0.6b", metavar="NAME,...")
    parser.add_argument("--url", help="a server that runs already, in place of --servers")
    parser.add_argument("--served-model-name", default="measured", help="with --url")
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--clients", type=_integers, default=[1, 8, 64, 256], metavar="N,...")
    parser.add_argument("--rates", type=_numbers, default=[4.0, 16.0, 32.0], metavar="PER_S,...")
    parser.add_argument("--seconds", type=float, default=15, help="of arrivals at each rate")
    parser.add_argument("--tries", type=int, default=20, help="requests of one client")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="the demo model on a CPU, tiny loads: does it run?")
    options = parser.parse_args()
    flags: list[str] = []
    kinds = [kind for kind in options.servers.split(",") if engines.is_present(kind)]
    models = options.models.split(",")
    if options.smoke:
        kinds, models, options.max_num_seqs = ["ours"], ["demo"], 8
        flags = ["--device", "cpu", "--max-model-len", "512", "--kv-cache-memory", "100MB"]
        options.vocabulary, options.prompt, options.output = 4000, 16, 6
        options.clients, options.rates, options.seconds, options.tries = [1, 4], [20.0], 0.4, 3
    if options.url:
        kinds, models = ["url"], ["given"]
    result: dict[str, Any] = {}
    failed = False
    with tempfile.TemporaryDirectory() as root:
        for model in models:
            runs: dict[str, dict[str, list[dict[str, Any]]]] = {kind: {} for kind in kinds}
            result[model] = runs
            for _ in range(options.repeats):
                for kind in kinds:

                    def note(load: str, figures: dict[str, Any]) -> None:
                        runs[kind].setdefault(load, []).append(figures)
                        shown = ", ".join(f"{name} {figures[name]:,.1f}" for name in _COLUMNS if name in figures)
                        say(f"{model}, {kind}, {load}: {shown}")
                        save(options.out, result)

                    port = servers.free_port()
                    url = options.url or f"http://127.0.0.1:{port}"
                    name = options.served_model_name if options.url else "measured"
                    client = Client(url, options.vocabulary, options.prompt, options.output, name)
                    running: Any = contextlib.nullcontext()
                    if not options.url:
                        folder = model_folder(model, Path(root))
                        running = servers.started(
                            kind, servers.command(kind, folder, port, options.max_num_seqs, *flags)
                        )
                    try:
                        with running:
                            if not options.url:
                                servers.wait_ready(kind, url)
                            asyncio.run(measure(client, options, note))
                    except Exception as error:
                        say(f"{model}, {kind} failed: {type(error).__name__}: {error}")
                        failed = True
            show(model, runs)
    save(options.out, result)
    return int(failed)


def show(model: str, runs: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Medians over the repeats, ours beside the peer's."""
    loads = list(dict.fromkeys(load for found in runs.values() for load in found))
    rows = []
    for load in loads:
        for column in _COLUMNS:
            values = {
                kind: median(figures[column] for figures in found[load])
                for kind, found in runs.items()
                if load in found and column in found[load][0]
            }
            ratio = values["ours"] / values["vllm"] if {"ours", "vllm"} <= values.keys() else None
            if values:
                rows.append([f"{load}, {column}", *(values.get(kind) for kind in runs), ratio])
    print_table([model, *runs, "ours / vllm"], rows)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


if __name__ == "__main__":
    raise SystemExit(main())
