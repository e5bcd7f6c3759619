"""Model after model, each in a process of its own, as far as the time allows; what there is is written after each."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from common.budget import Budget
from common.isolation import Figures, isolated
from common.report import Runs, collect, log_line, save


def measure_models(
    options: argparse.Namespace,
    measure: Callable[[str, argparse.Namespace], Iterator[Figures]],
    show: Callable[[Runs], Any],
) -> None:
    """`measure` yields a model's figures round by round; `show` prints all so far and returns their ratios."""
    budget, runs = Budget(options.time_limit_s), Runs()
    for name in options.models:
        if budget.allows("model"):
            log_line(name)
            with budget.spending("model"):
                isolated(measure, name, options, timeout_s=budget.left_s, note=partial(collect, runs, name))
            save(options.out, {"runs": runs, "ratios": show(runs)})
