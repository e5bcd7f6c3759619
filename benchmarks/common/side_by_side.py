"""Engines of one model that are alternatives, each alone on the GPUs, and their figures beside each other."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from common.budget import Budget
from common.isolation import Figures, Isolated, IsolationError
from common.report import Runs, collect, log_line, medians_of, print_table, save


def measure_alone(
    measure: Callable[..., Iterator[Figures]],
    model: str,
    label: str,
    engine: str,
    folder: Path,
    settings: dict[str, Any],
    figure_names: Sequence[str],
    options: Any,
    budget: Budget,
    result: dict[str, Any],
) -> Runs:
    """Rounds of one engine, in a process of its own, kept under `label`; returns all runs of the model so far.

    `measure` yields figures, as engine_offline's does. An error is kept, too, and what there is is written.
    """
    settings = {"max_num_seqs": options.max_num_seqs} | settings
    if options.smoke:
        settings |= {"device": "cpu", "kv_cache_memory": 32_000_000, "max_num_seqs": 8}
    runs: Runs = result["runs"].setdefault(model, {})
    arguments = (engine, str(folder), settings, options.smoke, None, *figure_names)
    try:
        with budget.spending(f"{model}, {label}"), Isolated(measure, *arguments) as isolated:
            isolated.start_step()
            for part in islice(isolated.answers(budget.left_s), 1):
                collect(runs, label, part)
            for _ in range(options.rounds):
                for part in takewhile(bool, isolated.parts(budget.left_s)):
                    collect(runs, label, part)
    except IsolationError as error:
        result["errors"].append(f"{model}, {label}: {error}")
        log_line(result["errors"][-1])
    save(options.out, result)
    return runs


def show_ratios(model: str, runs: Runs, one: str, two: str, ratio_name: str, targets: dict[str, float]) -> None:
    """Medians of each engine, the second's to the first's, and targets of that ratio."""
    found = medians_of(runs)
    below, above = found.get(one, {}), found.get(two, {})
    rows: list[list[Any]] = []
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        ratio = above[name] / below[name] if name in below and name in above else None
        rows.append([name, *(figures.get(name) for figures in found.values()), ratio, targets.get(name)])
    print_table([model, *found, ratio_name, "target"], rows)
