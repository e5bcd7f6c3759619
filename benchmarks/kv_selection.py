"""Decodes that select pages (--kv-selection quest) beside those that read all: between tokens, and attention alone.

    python benchmarks/kv_selection.py --model llama-3.1-8b --cases 8x65536,4x130816 --budgets 4096 --out FILE

Each variant is an engine's runner in a process of its own, one after another, with dummy weights; budgets come first,
and figures are written as they come. Contexts are not computed: the pages get random keys and values and the bounds of
those keys, each sequence pages of its own, and it begins as one does whose prompt is cached but for its last token. How
long a step takes depends neither on their values nor on which pages are selected. Steps are launched one ahead, as an
engine does. Attention is that of the layers that select, in one CUDA graph: for `none` decode attention, for a budget
scores, choice, attention and bounds.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from common.budget import Budget
from common.engines import SETTINGS, SMOKE_MODEL, SMOKE_SETTINGS
from common.isolation import Figures, isolated
from common.kernel_times import show_kernel_times
from common.models import model_folder
from common.report import integers, log_line, make_parser, print_table, save, words
from common.targets import Target, print_verdicts

_WARM_STEPS, _STEPS, _ROUNDS, _PROFILED = 12, 40, 3, 6
_MORE_PAGES = 2
"""Pages of a sequence for all of its steps."""
_FILLED_PAGES = 64
"""Pages that get random contents at a time."""
_TARGET = {"8x65536, 4096: none / quest, between tokens": Target(2.5, at_least=True)}


def measure(settings: dict[str, Any], cases: list[tuple[int, int]], with_kernels: bool) -> Iterator[Figures]:
    """Yields milliseconds between tokens and microseconds of attention in a layer, of each (sequences, context)."""
    import torch

    from mini_infer_engine.config.options.settings import EngineSettings
    from mini_infer_engine.core.batch import Batch, Row
    from mini_infer_engine.core.request import SamplingParams
    from mini_infer_engine.runtime.model_runner import load_runner

    page_size = settings["page_size"]
    longest = max(context for _, context in cases)
    most_tokens = max(sequences * context for sequences, context in cases)
    spare = (_MORE_PAGES + 1) * max(sequences for sequences, _ in cases) + 2
    settings = settings | {
        "max_model_len": longest + _MORE_PAGES * page_size,
        "max_num_seqs": max(rows for rows, _ in cases),
    }
    settings["kv_cache_memory"] = int((most_tokens // page_size + spare) * _page_bytes(settings))
    runner = load_runner(EngineSettings(**settings))
    _fill(runner.pool)
    greedy = SamplingParams(temperature=0.0)
    yield {"pool GB": runner.num_pages * runner.worker.page_bytes(page_size) / 1e9}
    for sequences, context in cases:
        order = torch.randperm(runner.num_pages, generator=torch.Generator().manual_seed(sequences)).tolist()
        width = -(-context // page_size) + _MORE_PAGES
        tables = [order[row * width : (row + 1) * width] for row in range(sequences)]
        last = [Row(row, context - 1, 1, [7 + row], table, greedy, noise_seed=row) for row, table in enumerate(tables)]
        runner.collect(runner.launch(Batch(last, 0)))
        steps = 4 if runner.device.type == "cpu" else _STEPS
        times: list[float] = []
        done = itertools.count()

        def launch(row_tables: list[list[int]] = tables, context: int = context) -> Any:
            step = next(done)
            rows = [
                Row(row, context + step, 1, None, table, greedy, row, step + 1) for row, table in enumerate(row_tables)
            ]
            return runner.launch(Batch(rows, len(rows)))

        for count in [_WARM_STEPS, *[steps] * _ROUNDS]:
            begin, before = time.perf_counter(), launch()
            for _ in range(count - 1):
                handle = launch()
                runner.collect(before)
                before = handle
            runner.collect(before)
            times.append((time.perf_counter() - begin) / count * 1e3)
        found = {"between tokens, ms": median(times[1:])}
        yield {f"{sequences}x{context}": found}
        if runner.device.type == "cuda":
            found["attention of a layer, us"] = _attention_us(runner, sequences, context)
            yield {f"{sequences}x{context}": found}
        if with_kernels and runner.device.type == "cuda":
            yield {f"{sequences}x{context}, kernels": show_kernel_times(lambda: runner.collect(launch()), _PROFILED)}


def _page_bytes(settings: dict[str, Any]) -> int:
    """Returns the bytes of a page, with the bounds of its keys."""
    from mini_infer_engine.config.options.hf_overrides import parse_hf_overrides
    from mini_infer_engine.models.registry import read_config

    config = read_config(Path(settings["model"]), overrides=parse_hf_overrides(settings.get("hf_overrides")))
    itemsize = 4 if settings["dtype"] == "float32" else 2
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    return token_bytes * (settings["page_size"] + 1)


def _fill(pool: Any) -> None:
    """Gives all pages random keys and values, and the bounds of those keys."""
    import torch

    from mini_infer_engine.config.options.kv_selection import DENSE_LAYERS
    from mini_infer_engine.runtime.attention.page_scores import key_bounds

    for begin in range(0, pool.num_pages, _FILLED_PAGES):
        pages = slice(begin, min(begin + _FILLED_PAGES, pool.num_pages))
        pool.storage[pages].normal_()
        if pool.bounds is not None:
            keys = pool.pages[pages, DENSE_LAYERS:, 0].flatten(0, 1)
            pool.bounds.pages[pages] = key_bounds(keys).unflatten(0, (pages.stop - begin, -1))
    if pool.pages.device.type == "cuda":
        torch.cuda.synchronize()


def _attention_us(runner: Any, sequences: int, context: int) -> float:
    """Returns the mean microseconds of the attention of a layer after the first two, which may select."""
    import torch
    from common.timing import microseconds

    from mini_infer_engine.config.options.kv_selection import DENSE_LAYERS

    executor, model = runner.executor, runner.worker.model
    layers = [layer for layer in model.attention_layers if layer.layer >= DENSE_LAYERS]
    heads = layers[0].num_heads + 2 * layers[0].num_kv_heads
    qkv = torch.randn(sequences, heads * layers[0].head_dim, device=runner.device, dtype=runner.worker.dtype)
    slots = torch.arange(sequences, device=runner.device, dtype=torch.int32)
    places = torch.full((sequences,), context, device=runner.device)
    with torch.inference_mode():
        attend = executor.attention.decode(executor.state.page_tables, slots, places, places)
        return microseconds([lambda layer=layer: attend(qkv, layer) for layer in layers])  # type: ignore[misc]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", metavar="NAME")
    parser.add_argument(
        "--cases", type=words, default=words("8x65536,8x32768,4x130816,1x65536"), metavar="NxTOKENS,..."
    )
    parser.add_argument("--budgets", type=integers, default=[4096], metavar="TOKENS,...")
    parser.add_argument("--page-size", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--kernels", action="store_true", help="by which kernels a step of each case takes its time")
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    if options.smoke:
        options.model, options.cases, options.budgets, options.page_size = SMOKE_MODEL, ["2x300", "1x40"], [64], 16
    cases = [(int(rows), int(tokens)) for rows, tokens in (case.split("x") for case in options.cases)]
    variants: dict[str, dict[str, Any]] = {
        str(tokens): {"kv_selection": "quest", "kv_selection_budget": tokens} for tokens in options.budgets
    }
    variants["none"] = {}
    found: dict[str, dict[str, Any]] = {}
    ratios: dict[str, float] = {}
    result = {"model": options.model, "page size": options.page_size, "variants": found, "none / quest": ratios}
    with tempfile.TemporaryDirectory() as root:
        settings = SETTINGS | {"model": model_folder(options.model, Path(root)), "page_size": options.page_size}
        if options.smoke:
            settings |= SMOKE_SETTINGS | {"hf_overrides": '{"num_hidden_layers": 4}'}
        else:
            settings["disable"] = ("prefill_graphs",)  # no prompts are computed
        for name, changes in variants.items():
            if not budget.allows("a variant"):
                continue
            log_line(name)

            def note(part: Figures, name: str = name) -> None:
                found.setdefault(name, {}).update(part)
                log_line(f"  {name}: {part}")
                save(options.out, result)

            with budget.spending("a variant"):
                found[name] = isolated(
                    measure, settings | changes, cases, options.kernels, timeout_s=budget.left_s, note=note
                )
        for case, name in itertools.product(options.cases, map(str, options.budgets)):
            for figure, value in found.get(name, {}).get(case, {}).items():
                if (exact := found.get("none", {}).get(case, {}).get(figure)) is not None:
                    ratios[f"{case}, {name}: none / quest, {figure.rpartition(',')[0]}"] = exact / value
        save(options.out, result)
    figures = list(dict.fromkeys((case, figure) for each in found.values() for case in options.cases
                                 for figure in each.get(case, {})))  # fmt: skip
    print_table(
        ["", *found],
        [
            [f"{case}: {figure}", *(each.get(case, {}).get(figure) for each in found.values())]
            for case, figure in figures
        ],
    )
    print_table(["none / quest", "ratio"], [[name, ratio] for name, ratio in ratios.items()])
    print_verdicts("selection", ratios, _TARGET)
    return int(any("error" in each for each in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
