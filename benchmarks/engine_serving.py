"""Our server beside vLLM's: its start with cold caches, then rates against latency over HTTP, from one start each.

    python benchmarks/engine_serving.py --servers ours,vllm --models qwen2.5-7b --rounds 3 --out FILE
    python benchmarks/engine_serving.py --url http://127.0.0.1:8080 --served-model-name NAME

Real sockets, clients in processes of their own on the same machine, token-id prompts, streamed answers: one client
alone (time to the first token, gaps), closed loops (all clients at once, one request each), then open ones (Poisson
arrivals at each rate). Token counts are asserted from the server's usage. Servers run in turns, with the same flags;
`--rounds` repeats the loads within a start. At the end our engine's offline rate, in the same run or from --offline.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import engine_offline
from common import engines, servers
from common.budget import Budget
from common.http_load import Client, Crowd
from common.isolation import isolated
from common.models import MEASURED, model_folder
from common.report import Runs, collect, integers, make_parser, medians_of, print_table, save, say, words
from common.targets import Target, print_verdicts, ratio_target, verdict_cells

_OURS = {
    "256 clients / offline W2, tok_s": Target(0.92, at_least=True),
    "one client - offline, ttft ms p50": Target(3.0),
}
_OFFLINE = ("w2 tok_s", "ttft ms 512")

Note = Callable[[str, dict[str, float]], None]


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


def visit(kind: str, folder: str, options: argparse.Namespace, crowd: Crowd, limit_s: float, note: Note) -> None:
    """Start a server, wait for its first token, load it."""

    def load(url: str, model: str) -> None:
        client = Client(url, options.vocabulary, options.prompt, options.output, model)
        warm_up(crowd, client)
        for _ in range(options.rounds):
            for name, figures in measure(crowd, client, options):
                note(name, figures)

    if options.url:
        load(options.url, options.served_model_name)
        return
    with (
        tempfile.TemporaryDirectory() as caches,
        servers.started(kind, folder, options.max_num_seqs, Path(caches), options.smoke) as server,
    ):
        note("start, cold", server.first_token(limit_s))
        load(server.url, "measured")


def offline_figures(model: str, folder: str, options: argparse.Namespace, limit_s: float) -> dict[str, float]:
    """Our engine's rate and time to the first token without HTTP: of an earlier result, or measured."""
    if options.offline and options.offline.exists():
        medians = json.loads(options.offline.read_text())["shown"].get(model, {}).get("medians", {})
        if "ours" in medians:
            return dict(medians["ours"])
    say(f"{model}, ours, offline")
    settings = engines.SMOKE_SETTINGS if options.smoke else {"max_num_seqs": options.max_num_seqs}
    runs: Runs = {}
    arguments = ("ours", folder, settings, options.smoke, options.rounds, *_OFFLINE)
    isolated(engine_offline.measure, *arguments, timeout_s=limit_s, note=partial(collect, runs, "ours"))
    return medians_of(runs).get("ours", {})


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
        say("packages are read")
    with tempfile.TemporaryDirectory() as root, Crowd(options.client_processes) as crowd:
        folders = {model: "" if options.url else model_folder(model, Path(root)) for model in models}
        for model, kind in [(model, kind) for _ in range(options.repeats) for model in models for kind in kinds]:

            def note(load: str, figures: dict[str, float]) -> None:
                collect(all_runs[model], kind, {f"{load}, {name}": value for name, value in figures.items()})
                shown = ", ".join(f"{name} {value:,.2f}" for name, value in figures.items())
                say(f"{model}, {kind}, {load}: {shown}")
                save(options.out, result)

            if budget.allows(kind, options.peer_start_s if kind == "vllm" else 0.0):
                try:
                    with budget.spending(kind):
                        visit(kind, folders[model], options, crowd, budget.left_s, note)
                except Exception as error:
                    say(f"{model}, {kind} failed: {type(error).__name__}: {error}")
                    result["errors"].append(f"{model}, {kind}: {error}")
        for model in models if "ours" in kinds and options.clients else ():
            if budget.allows("offline"):
                with budget.spending("offline"):
                    result["offline"][model] = offline_figures(model, folders[model], options, budget.left_s)
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
    parser.add_argument("--tries", type=int, default=20, help="requests of one client")
    parser.add_argument("--client-processes", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=1, help="starts of each server")
    parser.add_argument("--rounds", type=int, default=1, help="of all loads in one start")
    parser.add_argument(
        "--offline", type=Path, metavar="FILE", help="of engine_offline.py, in place of measuring again"
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
