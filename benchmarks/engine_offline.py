"""Our engine beside others where they are installed, offline, with random weights: one JSON, one table, a plot.

    python benchmarks/engine_offline.py --engines ours,vllm,vllm-inproc --max-num-seqs 512,256 --rounds 3 --out FILE

All engines of a model hold the GPU together, each in a process of its own with a KV cache of the same size, which holds
every load whole. One at a time runs all loads, the others wait; so `--rounds` times. The first round is every variant's
of a peer; later ones are only of those within 2 % of the best in some figure. Figures are medians over rounds, ratios
are to the best variant, figure by figure. The engines start at the same time: "start s" is not compared here, but in
startup.py. With --one-by-one each engine has the whole GPU, for models of which it holds no two, and all its rounds
before the next one starts. --loads names the figures that are wanted by how they begin: "w1,itl ms bs 1,ttft".
--checkpoint has all engines load one checkpoint of random weights, which is written first: what a pass of a mixture of
experts reads depends on how its router spreads tokens, and so on the weights.

Engines: ours, baseline (ours from another checkout, which BASELINE names), vllm, vllm-inproc (its core in the same
process), nano-vllm, transformers (batch 1 only). PEER_SITE names a folder of packages that only peers see. The loads
are in common/loads.py; bounds, in common/models.py, are an H200's.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

from common import engines, loads
from common.budget import Budget
from common.caches import cache_variables
from common.isolation import Isolated, IsolationError
from common.models import MEASURED, Bound, kv_bytes_per_token, model_folder, vocabulary
from common.quiet import measuring
from common.record import Record
from common.report import Runs, boot_id, integers, log_line, make_parser, medians_of, print_table, save, words
from common.shared_checkpoint import shared_checkpoint
from common.targets import Target, is_rate, print_verdicts, ratio_target, verdict_cells

_NEAR = 1.02
"""A variant this close to the best may be the best."""
_OF_TRANSFORMERS = ("itl ms bs 1", "ttft")
"""Figures that do not take minutes."""
_OF_ONE_MODEL = {"qwen2.5-7b": {"itl bs 8 / bs 1": Target(1.14)}}
_KV_TOKENS = 280_000
"""More than any load holds at a time: W2's 196,608 are the most."""


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
    engine: str,
    model: str,
    settings: dict[str, Any],
    smoke: bool,
    caches: Path | None = None,
    *figure_names: str,
    first_token: tuple[int, ...] = (),
) -> Iterator[dict[str, float]]:
    """One engine's figures, those that begin with a word that is wanted, as they come; in a process of its own.

    First that of its start, then round after round; a part without figures ends each.
    """
    if caches is not None:
        os.environ.update(cache_variables(caches))
    if engine == "transformers":
        figure_names = _OF_TRANSFORMERS
    sizes = loads.SMOKE if smoke else loads.FULL
    sizes = replace(sizes, vocabulary=vocabulary(model, sizes.vocabulary))
    if first_token:
        sizes = replace(sizes, first_token=first_token, repeats_shapes=True)
    begin = time.perf_counter()
    loaded = engines.load(engine, model, settings)
    yield {"start s": time.perf_counter() - begin}
    for round_ in count():
        for name, value in loads.run_loads(
            loaded, sizes, round_, lambda name: not figure_names or name.startswith(figure_names)
        ):
            yield {name: value}
        yield {}


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


def earlier(path: Path | None) -> dict[str, Runs]:
    """Runs by model in a result of this machine since it was started: others are not mixed in."""
    if path is None or not path.exists():
        return {}
    result = json.loads(path.read_text())
    if result["boot"] != boot_id():
        log_line(f"{path} is of another machine: not taken up")
        return {}
    runs: dict[str, Runs] = result["runs"]
    return runs


def main() -> int:
    options = parse()
    budget = Budget(options.time_limit_s)
    contenders = list_contenders(options)
    result: dict[str, Any] = {
        "vllm's environment": engines.VLLM_ENVIRONMENT,
        "settings": {contender.label: engines.vllm_keywords(contender.settings) for contender in contenders},
        "runs": earlier(options.resume),
        "errors": [],
    }
    peers = any(contender.engine != "ours" for contender in contenders)
    with tempfile.TemporaryDirectory() as root:
        for model in [engines.SMOKE_MODEL] if options.smoke else options.models:
            if budget.allows("start", options.peer_start_s if peers else 0.0):
                result["runs"][model] = {}
                with _weights(model_folder(model, Path(root)), Path(root), options, budget, result) as (
                    folder,
                    settings,
                ):
                    chosen = [replace(one, settings=one.settings | settings) for one in contenders]
                    for group in [[one] for one in chosen] if options.one_by_one else [chosen]:
                        side_by_side(model, folder, group, options, budget, result)
    result["shown"] = {model: show(model, runs) for model, runs in result["runs"].items()}
    save(options.out, result)
    if options.plot and any(found["ratios"] for found in result["shown"].values()):
        plot(options.plot, result["shown"])
    return int(bool(result["errors"]))


@contextmanager
def _weights(
    folder: str, root: Path, options: argparse.Namespace, budget: Budget, result: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The folder that engines load, and settings: each makes its own weights, or all read one checkpoint."""
    if not options.checkpoint:
        yield folder, {}
        return
    target = root / f"{Path(folder).name}-written"
    with shared_checkpoint(folder, target, None, budget) as written:
        if "error" in written:
            result["errors"].append(f"{folder}, checkpoint: {written['error']}")
        result.setdefault("checkpoints", {})[Path(folder).name] = written
        yield str(target), {"load_format": "auto"}


def parse() -> argparse.Namespace:
    """Flags."""
    parser = make_parser(__doc__, starts_peers=True)
    parser.add_argument("--checkpoint", action="store_true", help="all engines load one checkpoint, written first")
    parser.add_argument("--engines", type=words, default=words("ours,vllm,vllm-inproc"), metavar="NAME,...")
    parser.add_argument("--models", type=words, default=MEASURED, metavar="NAME,...")
    parser.add_argument("--rounds", type=int, default=3, help="of all loads, the engines in turns")
    parser.add_argument("--max-num-seqs", type=integers, default=[512], metavar="N,...", help="several: of the peers")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="default: each engine's own")
    parser.add_argument(
        "--caches", type=Path, metavar="DIR", help="of compiled code, by model and engine: a quick start"
    )
    parser.add_argument(
        "--loads", type=words, default=(), metavar="NAME,...", help="figures that begin so (default: all)"
    )
    parser.add_argument(
        "--first-token", type=integers, default=(), metavar="N,...", help="lengths of the prompts of ttft"
    )
    parser.add_argument("--one-by-one", action="store_true", help="each engine by itself, not all on the GPU together")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep other models' results of the same machine")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    return parser.parse_args()


def list_contenders(options: argparse.Namespace) -> list[Contender]:
    """Ours once, a peer for each of the numbers of sequences; those that are installed."""
    found = []
    for engine in options.engines:
        if not engines.is_present(engine):
            log_line(f"{engine} is not installed here: left out")
            continue
        for number in options.max_num_seqs[:1] if engine == "ours" else options.max_num_seqs:
            settings = {"max_num_seqs": number}
            if options.max_num_batched_tokens:
                settings["max_num_batched_tokens"] = options.max_num_batched_tokens
            if options.first_token:
                settings["max_model_len"] = max(engines.CONTEXT_TOKENS, max(options.first_token) + 1)
            found.append(Contender(engine, engines.SMOKE_SETTINGS if options.smoke else settings))
    return found


def side_by_side(
    model: str,
    folder: str,
    contenders: list[Contender],
    options: argparse.Namespace,
    budget: Budget,
    result: dict[str, Any],
) -> None:
    """Start all engines of a model at once, then let one at a time run the loads; what is measured is kept at once."""
    runs: Runs = result["runs"][model]
    alone = options.smoke or options.one_by_one
    together = {} if alone else engines.share_of_gpu(_KV_TOKENS * kv_bytes_per_token(folder))

    record = Record(runs, result, options.out, f"{model}, ")

    def goes_well(label: str, parts: Iterator[dict[str, float]]) -> bool:
        try:
            for part in parts:
                record.keep(label, part)
        except IsolationError as error:
            record.fail(label, error)
            return False
        return True

    with ExitStack() as stack:
        log_line(f"{model}: {', '.join(contender.label for contender in contenders)} start")
        with budget.spending("start"):
            processes: dict[str, Isolated] = {}
            for contender in contenders:
                caches = options.caches and options.caches / model / engines.base_name(contender.engine)
                settings = contender.settings | together
                arguments = (contender.engine, folder, settings, options.smoke, caches, *options.loads)
                measured = partial(measure, first_token=tuple(options.first_token))
                processes[contender.label] = stack.enter_context(Isolated(measured, *arguments))
                processes[contender.label].start_step()
            starts = {label: islice(process.answers(budget.left_s), 1) for label, process in processes.items()}
            ready = [label for label, start in starts.items() if goes_well(label, start)]
        stack.enter_context(measuring())
        for round_ in range(options.rounds):
            for label in order_of(round_, ready, runs):
                if budget.allows(f"{model}, {label}"):
                    log_line(f"{model}, {label}, round {round_ + 1}")
                    with budget.spending(f"{model}, {label}"):
                        one_round = takewhile(bool, processes[label].parts(budget.left_s))
                        if not goes_well(label, one_round):
                            ready.remove(label)


def order_of(round_: int, ready: list[str], runs: Runs) -> list[str]:
    """Whose turn it is: in the first round, 0, everybody's; later ours and of the peers' variants the best.

    Every other round goes backwards, so that a drift of the machine hits all alike.
    """
    chosen = set(ready) if round_ == 0 else worth_repeating(medians_of(runs)) | {"ours"}
    order = [label for label in ready if label in chosen]
    return order[::-1] if round_ % 2 else order


if __name__ == "__main__":
    raise SystemExit(main())
