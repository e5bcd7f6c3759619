"""Our engine beside others where they are installed, offline, with random weights: one JSON, one table, a plot.

    python benchmarks/engine_offline.py --engines ours,vllm,vllm-inproc --max-num-seqs 512,256 --repeats 3 --out FILE

Engines start in turns, each in a process of its own, and run all loads `--rounds` times; figures are medians over
rounds and starts. The first turn is every variant's of a peer; later ones are only of those within 2 % of the best in
some figure. Ratios are to the best variant, figure by figure. A start that fails or is cut off keeps the loads that it
has finished and does not count: with `--resume` it is made up for first, then turns go on up to `--repeats` in all.

Engines: ours, vllm, vllm-inproc (its core in the same process), nano-vllm, transformers (batch 1 only). PEER_SITE names
a folder of packages that only peers see. The loads are in common/loads.py; bounds, in common/models.py, are an H200's.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import engines, loads
from common.budget import Budget
from common.isolation import isolated
from common.models import MEASURED, Bound, model_folder
from common.report import Runs, boot_id, collect, integers, make_parser, medians_of, print_table, save, say, words
from common.targets import Target, is_rate, print_verdicts, ratio_target, verdict_cells

_NEAR = 1.02
"""A variant this close to the best may be the best."""
_OF_TRANSFORMERS = ("itl ms bs 1", "ttft")
"""Figures that do not take minutes."""
_OF_ONE_MODEL = {"qwen2.5-7b": {"itl bs 8 / bs 1": Target(1.14)}}

Finished = dict[str, int]
"""Starts by contender that ran all loads."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with its settings."""

    engine: str
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        """Ours is one column, a peer has one for each variant."""
        return self.engine if self.engine == "ours" else f"{self.engine} {self.settings['max_num_seqs']}"


def measure(
    engine: str, model: str, settings: dict[str, Any], smoke: bool, rounds: int, *wanted: str
) -> Iterator[dict[str, float]]:
    """One engine's figures, those that begin with a word that is wanted, as they come; in a process of its own."""
    if engine == "transformers":
        wanted = _OF_TRANSFORMERS
    sizes = loads.SMOKE if smoke else loads.FULL
    begin = time.perf_counter()
    loaded = engines.load(engine, model, settings)
    yield {"start s": time.perf_counter() - begin}
    for round_ in range(rounds):
        for name, value in loads.run_loads(loaded, sizes, round_, lambda name: not wanted or name.startswith(wanted)):
            say(f"  {name} {value:,.2f}")
            yield {name: value}


def best(figure: str, found: dict[str, dict[str, float]]) -> float | None:
    """Of all contenders but ours."""
    values = [figures[figure] for label, figures in found.items() if label != "ours" and figure in figures]
    return None if not values else max(values) if is_rate(figure) else min(values)


def worth_repeating(found: dict[str, dict[str, float]]) -> set[str]:
    """The fewest peers' variants that hold, or come near to, the best of every figure. The start is no such figure."""
    near: dict[str, set[str]] = {}
    names = {name for figures in found.values() for name in figures} - {"start s"}
    for name in names:
        top = best(name, found)
        for label, figures in found.items():
            if top is not None and label != "ours" and name in figures:
                behind = top / figures[name] if is_rate(name) else figures[name] / top
                near.setdefault(label, set()).update({name} if behind <= _NEAR else ())
    chosen: set[str] = set()
    while near and (label := max(near, key=lambda label: len(near[label]))) and near[label]:
        covered = near.pop(label)
        chosen.add(label)
        near = {other: left - covered for other, left in near.items()}
    return chosen


def show(model: str, runs: Runs) -> dict[str, Any]:
    """Print medians, ours against the best peer, its target, and our share of the bound; returns them."""
    found = medians_of(runs)
    bound = Bound.of(model)
    limits = {} if bound is None else loads.bounds(bound)
    ours = found.get("ours", {})
    names = list(dict.fromkeys(figure for figures in found.values() for figure in figures))
    ratios: dict[str, float] = {}
    rows = []
    for name in names:
        top = best(name, found)
        share = None
        if name in ours and top is not None:
            ratios[name] = ours[name] / top
        if name in ours and name in limits:
            share = ours[name] / limits[name] if is_rate(name) else limits[name] / ours[name]
        columns = [figures.get(name) for figures in found.values()]
        rows.append(
            [name, *columns, ratios.get(name), *verdict_cells(ratio_target(model, name), ratios.get(name)), share]
        )
    print_table([model, *found, "ours / best", "target", "", "share of bound"], rows)
    if {"itl ms bs 8", "itl ms bs 1"} <= ours.keys():
        grown = {"itl bs 8 / bs 1": ours["itl ms bs 8"] / ours["itl ms bs 1"]}
        print_verdicts(model, grown, _OF_ONE_MODEL.get(model, {}))
    return {"medians": found, "bounds": limits, "ratios": ratios}


def plot(path: Path, shown: dict[str, dict[str, Any]]) -> None:
    """How many times as fast as the best peer, a bar a figure and model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = {model: found["ratios"] for model, found in shown.items()}
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    figure, axes = pyplot.subplots(figsize=(10, 0.35 * len(names) * len(columns) + 1.5))
    for offset, (model, column) in enumerate(columns.items()):
        faster = [column.get(name, 0) if is_rate(name) else 1 / column[name] if name in column else 0 for name in names]
        places = [index + offset / (len(columns) + 1) for index in range(len(names))]
        axes.barh(places, faster, height=1 / (len(columns) + 1), label=model)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks([index + 0.3 for index in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as the best peer")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def earlier(path: Path | None) -> dict[str, Any]:
    """Runs and finished starts by model in a result of this machine since it was started: others are not mixed in."""
    nothing: dict[str, Any] = {"runs": {}, "finished": {}}
    if path is None or not path.exists():
        return nothing
    result = json.loads(path.read_text())
    if result["boot"] != boot_id():
        say(f"{path} is of another machine: not taken up")
        return nothing
    return {name: result[name] for name in nothing}


def main() -> int:
    parser = make_parser(__doc__, starts_peers=True)
    parser.add_argument("--engines", type=words, default=words("ours,vllm,vllm-inproc"), metavar="NAME,...")
    parser.add_argument("--models", type=words, default=MEASURED, metavar="NAME,...")
    parser.add_argument("--repeats", type=int, default=3, help="finished starts of each engine, resumed ones included")
    parser.add_argument("--rounds", type=int, default=1, help="of all loads in one start")
    parser.add_argument("--max-num-seqs", type=integers, default=[512], metavar="N,...", help="several: of the peers")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="default: each engine's own")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="take up an earlier result of the same machine")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    models, repeats = ([engines.SMOKE_MODEL], 1) if options.smoke else (options.models, options.repeats)
    contenders = list_contenders(options)
    result: dict[str, Any] = {
        "vllm's environment": engines.VLLM_ENVIRONMENT,
        "settings": {contender.label: engines.vllm_keywords(contender.settings) for contender in contenders},
        **earlier(options.resume),
        "errors": [],
    }
    all_runs: dict[str, Runs] = result["runs"]
    with tempfile.TemporaryDirectory() as root:
        for turn, model in itertools.product(range(repeats), models):
            folder = model_folder(model, Path(root))
            runs, finished = all_runs.setdefault(model, {}), result["finished"].setdefault(model, {})
            for contender in due(turn, contenders, runs, finished):
                kind, is_new = f"{model}, {contender.engine}", contender.label not in finished
                if budget.allows(kind, options.peer_start_s if is_new and contender.engine != "ours" else 0.0):
                    with budget.spending(kind):
                        start(contender, model, folder, options, budget.left_s, result)
    result["shown"] = {model: show(model, runs) for model, runs in all_runs.items()}
    save(options.out, result)
    if options.plot and any(found["ratios"] for found in result["shown"].values()):
        plot(options.plot, result["shown"])
    return int(bool(result["errors"]))


def list_contenders(options: argparse.Namespace) -> list[Contender]:
    """Ours once, a peer for each of the numbers of sequences; those that are installed."""
    found = []
    for engine in options.engines:
        if not engines.is_present(engine):
            say(f"{engine} is not installed here: left out")
            continue
        for number in options.max_num_seqs[:1] if engine == "ours" else options.max_num_seqs:
            settings = {"max_num_seqs": number}
            if options.max_num_batched_tokens:
                settings["max_num_batched_tokens"] = options.max_num_batched_tokens
            found.append(Contender(engine, engines.SMOKE_SETTINGS if options.smoke else settings))
    return found


def start(
    contender: Contender, model: str, folder: str, options: argparse.Namespace, limit_s: float, result: dict[str, Any]
) -> None:
    """Start an engine and run all loads; what it finishes is in `result` at once, even if it is cut off."""
    label, finished = contender.label, result["finished"][model]
    say(f"{model}, {label}, start {finished.get(label, 0) + 1}")

    def note(part: dict[str, float]) -> None:
        collect(result["runs"][model], label, part)
        save(options.out, result)

    arguments = (contender.engine, folder, contender.settings, options.smoke, options.rounds)
    found = isolated(measure, *arguments, timeout_s=limit_s, note=note)
    if "error" in found:
        result["errors"].append(f"{model}, {label}: {found['error']}")
    else:
        finished[label] = finished.get(label, 0) + 1
    save(options.out, result)


def due(turn: int, contenders: list[Contender], runs: Runs, finished: Finished) -> list[Contender]:
    """Who starts in this turn: in the first, 0, all who have not finished one yet.

    Later those with no more turns than this behind them: ours, and the peers' variants that may be the best.
    """
    if turn == 0:
        return [contender for contender in contenders if not finished.get(contender.label)]
    chosen = worth_repeating(medians_of(runs)) | {"ours"}
    return [
        contender
        for contender in contenders
        if contender.label in chosen and 0 < finished.get(contender.label, 0) <= turn
    ]


if __name__ == "__main__":
    raise SystemExit(main())
