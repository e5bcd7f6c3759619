"""Our server beside vLLM's: the start of each with cold caches, then rates against latency over HTTP, in turns.

    python benchmarks/engine_serving.py --servers ours,vllm --models qwen2.5-7b --rounds 3 --out FILE
    python benchmarks/engine_serving.py --url http://127.0.0.1:8080 --served-model-name NAME

Servers of a model start one after another, alone on a quiet machine, with the same flags and equal shares of the GPU,
and stay; then one at a time has all loads while the others wait, `--rounds` times. Real sockets, clients in processes
of their own on the same machine, token-id prompts, streamed answers: one client alone (time to the first token, gaps),
closed loops (all clients at once, one request each), then open ones (Poisson arrivals at each rate). Token counts are
asserted from the server's usage. At the end our engine's offline rate, in the same run or from --offline.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any

import aiohttp
import engine_offline
from common import engines, servers
from common.budget import Budget
from common.engines import MEMORY_SHARE
from common.http_load import Client, Crowd
from common.isolation import Isolated, IsolationError
from common.models import MEASURED, model_folder, vocabulary
from common.quiet import measuring
from common.report import Runs, collect, integers, log_line, make_parser, medians_of, print_table, save, words
from common.targets import Target, print_verdicts, ratio_target, verdict_cells

_OURS = {
    "256 clients / offline W2, tok_s": Target(0.92, at_least=True),
    "one client - offline, ttft ms p50": Target(3.0),
}
_OFFLINE = ("w2 tok_s", "ttft ms 512")


def measure(crowd: Crowd, client: Client, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """One round of all loads against one server."""
    yield "one client", crowd.single(client, options.tries)
    for clients in options.clients:
        yield f"{clients} clients", crowd.closed(client, clients)
    for rate in options.rates:
        requests = max(4, int(rate * options.seconds))
        yield f"{rate:g} requests/s", crowd.opened(client, rate, requests)


def warm_up(crowd: Crowd, client: Client) -> None:
    """Uncounted: a few short requests, as the first ones of a server's life."""
    crowd.closed(Client(client.url, client.vocabulary, max(1, client.prompt_tokens // 4), 8, client.model), 8)


def side_by_side(
    model: str,
    kinds: list[str],
    folder: str,
    options: argparse.Namespace,
    crowd: Crowd,
    budget: Budget,
    result: dict[str, Any],
) -> None:
    """Start all servers of a model and load them in turns; what is measured is kept at once."""

    def note(kind: str, load: str, figures: dict[str, float]) -> None:
        collect(result["runs"][model], kind, {f"{load}, {name}": value for name, value in figures.items()})
        shown = ", ".join(f"{name} {value:,.2f}" for name, value in figures.items())
        log_line(f"{model}, {kind}, {load}: {shown}")
        save(options.out, result)

    settings = {"max_num_seqs": options.max_num_seqs, "gpu_memory_utilization": MEMORY_SHARE / len(kinds)}
    known_ids = vocabulary(folder, options.vocabulary) if folder else options.vocabulary
    clients: dict[str, Client] = {}
    with ExitStack() as stack:
        caches = options.caches or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for kind in kinds:
            if not budget.allows(f"start of {kind}", options.peer_start_s if kind == "vllm" else 0.0):
                continue
            url, name = options.url, options.served_model_name
            if not url:
                log_line(f"{model}, {kind} starts")
                started = servers.started(kind, folder, settings, caches / model / kind, options.smoke)
                with budget.spending(f"start of {kind}"):
                    server = stack.enter_context(started)
                    note(kind, "start, cold", server.first_token(budget.left_s))
                url, name = server.url, "measured"
            clients[kind] = Client(url, known_ids, options.prompt, options.output, name)
            warm_up(crowd, clients[kind])
        stack.enter_context(measuring())
        for round_ in range(options.rounds):
            for kind in list(clients)[:: -1 if round_ % 2 else 1]:
                if budget.allows(f"{model}, {kind}"):
                    with budget.spending(f"{model}, {kind}"):
                        for load, figures in measure(crowd, clients[kind], options):
                            note(kind, load, figures)


def offline_figures(model: str, folder: str, options: argparse.Namespace, limit_s: float) -> dict[str, float]:
    """Our engine's rate and time to the first token without HTTP: of an earlier result, or measured."""
    if options.offline:
        shown = json.loads(options.offline.read_text())["shown"] if options.offline.exists() else {}
        return dict(shown.get(model, {}).get("medians", {}).get("ours", {}))
    log_line(f"{model}, ours, offline")
    settings = engines.SMOKE_SETTINGS if options.smoke else {"max_num_seqs": options.max_num_seqs}
    with Isolated(engine_offline.measure, "ours", folder, settings, options.smoke, None, *_OFFLINE) as process:
        parts = takewhile(bool, process.parts(limit_s))  # of one round
        return {name: value for part in parts for name, value in part.items()}


def show(model: str, runs: Runs, offline: dict[str, float]) -> None:
    """Medians, ours beside the peer's with its target, and what ours owes to its offline self."""
    found = medians_of(runs)
    rows = []
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        values = {kind: figures[name] for kind, figures in found.items() if name in figures}
        ratio = values["ours"] / values["vllm"] if {"ours", "vllm"} <= values.keys() else None
        rows.append([name, *map(values.get, found), ratio, *verdict_cells(ratio_target(model, name), ratio)])
    print_table([model, *found, "ours / vllm", "target", ""], rows)
    ours = found.get("ours", {})
    if {"256 clients, tok_s", "one client, ttft_ms_p50"} <= ours.keys() and set(_OFFLINE) <= offline.keys():
        share = ours["256 clients, tok_s"] / offline["w2 tok_s"]
        later_ms = ours["one client, ttft_ms_p50"] - offline["ttft ms 512"]
        print_verdicts(f"{model}, ours", dict(zip(_OURS, (share, later_ms), strict=True)), _OURS)


def main() -> int:
    options = parse()
    budget = Budget(options.time_limit_s)
    kinds = ["url"] if options.url else [kind for kind in options.servers if engines.is_present(kind)]
    models = ["given"] if options.url else options.models
    all_runs: dict[str, Runs] = {model: {kind: {} for kind in kinds} for model in models}
    result: dict[str, Any] = {"runs": all_runs, "offline": {}, "errors": []}
    if not options.url and not options.smoke:
        servers.read_packages()
        log_line("packages are read")
    with tempfile.TemporaryDirectory() as root, Crowd(options.client_processes) as crowd:
        for model in models:
            folder = "" if options.url else model_folder(model, Path(root))
            try:
                side_by_side(model, kinds, folder, options, crowd, budget, result)
                if "ours" in kinds and options.clients and budget.allows("offline"):
                    with budget.spending("offline"):
                        result["offline"][model] = offline_figures(model, folder, options, budget.left_s)
            except (IsolationError, TimeoutError, RuntimeError, OSError, aiohttp.ClientError) as error:
                log_line(f"{model} failed: {type(error).__name__}: {error}")
                result["errors"].append(f"{model}: {error}")
    for model, runs in all_runs.items():
        show(model, runs, result["offline"].get(model, {}))
    save(options.out, result)
    return int(bool(result["errors"]))


def parse() -> argparse.Namespace:
    """Flags; --smoke makes everything small."""
    parser = make_parser(__doc__, starts_peers=True)
    parser.add_argument("--servers", type=words, default=words("ours,vllm"), metavar="NAME,...")
    parser.add_argument("--models", type=words, default=MEASURED, metavar="NAME,...")
    parser.add_argument("--url", help="a server that runs already, in place of --servers")
    parser.add_argument("--served-model-name", default="measured", help="with --url")
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--clients", type=integers, default=[8, 64, 256], metavar="N,...")
    parser.add_argument("--rates", type=_numbers, default=[], metavar="PER_S,...")
    parser.add_argument("--seconds", type=float, default=15, help="of arrivals at each rate")
    parser.add_argument("--tries", type=int, default=15, help="requests of one client")
    parser.add_argument("--client-processes", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="of all loads, the servers in turns")
    parser.add_argument("--caches", type=Path, metavar="DIR", help="keep compiled code there, which must be empty")
    parser.add_argument(
        "--offline", type=Path, metavar="FILE", help="of engine_offline.py, in place of measuring; it may lack models"
    )
    options = parser.parse_args()
    if options.smoke:
        small = {"models": [engines.SMOKE_MODEL], "vocabulary": 4000, "prompt": 16, "output": 6, "clients": [1, 4]}
        small |= {"rates": [20.0], "seconds": 0.4, "tries": 3, "client_processes": 2, "max_num_seqs": 8}
        vars(options).update(small)
    return options


def _numbers(text: str) -> list[float]:
    return [float(part) for part in words(text)]


if __name__ == "__main__":
    raise SystemExit(main())
