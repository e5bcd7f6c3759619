"""Every mechanism off, one at a time: all-on and minus-one for batch 1, 32, 256 and a mixed trace.

    python benchmarks/ablations.py --model qwen2.5-1.5b --out FILE

The variants' engines live in one process and run all loads in turns, the same prompts for each, `--rounds` times;
figures are medians. So two engines alike differ by 0.4 %, in loads of many rows by up to 4 % (in processes of their own
by 4 % in all). What is twice as slow as all-on is not measured again.

The trace: requests of four families that share a beginning, short and long, half of them sampled, all at once. Each
mechanism is switched off by a setting of the engine: by a flag of its own, or by its name in `--disable`.
Chunked prefill shows in interference.py; what is the server's mechanism (a process of its own, tokens in batches) in
engine_serving.py.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from common import engines
from common.budget import Budget
from common.isolation import Isolated, IsolationError
from common.models import kv_bytes_per_token, model_folder, vocabulary
from common.quiet import measuring
from common.record import Record
from common.report import Runs, integers, make_parser, medians_of, print_table, save, words
from common.targets import is_rate

from mini_infer_engine.config.options.mechanisms import Mechanism


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of the engine that switch a mechanism off."""

    settings: dict[str, Any] = field(default_factory=dict)
    on_cpu: bool = False
    """Whether a smoke run can show it."""


_KV_TOKENS = 220_000
"""More than any load holds at a time, in pages of 256, too."""


ALL_ON = "all on"
VARIANTS = {
    ALL_ON: Variant(on_cpu=True),
    "step_depth 0": Variant({"step_depth": 0}, on_cpu=True),
    "no prefix cache": Variant({"enable_prefix_caching": False}, on_cpu=True),
    "no CUDA graphs": Variant({"enforce_eager": True}),
    **{f"no {mechanism}": Variant({"disable": (str(mechanism),)}) for mechanism in Mechanism},
    "no pdl, stream_k": Variant({"disable": ("pdl", "stream_k")}),
    "flash-attn for prompts": Variant({"attention_backend": "flash"}),
    "pages of 16": Variant({"page_size": 16}),
    "chunks of 512": Variant({"long_prefill_token_threshold": 512}),
    "torch for kernels and graphs": Variant({"attention_backend": "torch"}),
}


def measure(
    model: str, names: list[str], settings: dict[str, Any], batches: list[int], rounds: int, scale: int
) -> Iterator[dict[str, Any]]:
    """A variant's name and some of its figures, or the error that it ended with: of its start, then round by round.

    Lengths are divided by `scale`.
    """
    run_loads = partial(loads, known_ids=vocabulary(model), scale=scale)
    running: dict[str, engines.Engine] = {}
    all_on: dict[str, float] = {}
    too_slow: set[str] = set()

    def try_out(name: str, work: Callable[[], Iterator[dict[str, float]]]) -> Iterator[dict[str, Any]]:
        try:
            yield from ({"name": name, "figures": figures} for figures in work())
        except Exception as error:
            running.pop(name, None)
            yield {"name": name, "error": f"{type(error).__name__}: {error}"[:500]}

    def start(name: str) -> Iterator[dict[str, float]]:
        begin = time.perf_counter()
        running[name] = engines.load("ours", model, settings | VARIANTS[name].settings)
        for _ in run_loads(running[name], [2], scale=16 * scale, seed=0):  # what compiles late has done so
            pass
        yield {"start s": time.perf_counter() - begin}

    for name in names:
        yield from try_out(name, partial(start, name))
    for round_ in range(rounds):
        for name in list(running)[:: -1 if round_ % 2 else 1]:
            if name in too_slow:
                continue
            found: dict[str, float] = {}
            for part in try_out(name, partial(run_loads, running[name], batches, seed=round_)):
                found |= part.get("figures", {})
                yield part
            if name == ALL_ON:
                all_on = found
            elif any(
                found[figure] > 2 * value for figure, value in all_on.items() if "itl" in figure and figure in found
            ):
                too_slow.add(name)  # it stays: to take an engine down makes the others' full collections long again


def loads(
    engine: engines.Engine, batches: list[int], *, known_ids: int, scale: int, seed: int
) -> Iterator[dict[str, float]]:
    """Milliseconds a token by batch, tokens a second of the trace."""
    dice = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [dice.randrange(known_ids) for _ in range(max(1, length // scale))]

    def timed(prompts: list[list[int]], limits: list[int], temperature: float = 0.0) -> float:
        begin = time.perf_counter()
        made = engine.run(prompts, limits, temperature)
        assert made == sum(limits)
        return time.perf_counter() - begin

    steps = max(2, 128 // scale)
    for batch in batches:
        prompts = [prompt(512) for _ in range(batch)]
        timed(prompts, [1] * batch)  # cached from here on: seconds of prefill would hide what decoding takes
        first_s = timed(prompts, [1] * batch)
        whole_s = timed(prompts, [steps + 1] * batch)
        yield {f"itl ms bs {batch}": (whole_s - first_s) / steps * 1e3}
    families = [prompt(1024) for _ in range(4)]
    count = max(2, 256 // scale)
    prompts = [dice.choice(families) + prompt(dice.randint(20, 400)) for _ in range(count)]
    limits = [max(1, dice.randint(16, 256) // scale) for _ in range(count)]
    halves = [(prompts[part::2], limits[part::2], temperature) for part, temperature in ((0, 0.0), (1, 0.8))]
    yield {"trace tok_s": sum(limits) / sum(timed(*half) for half in halves)}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--variants", type=words, default=list(VARIANTS), metavar="NAME,...")
    parser.add_argument("--batches", type=integers, default=[1, 32, 256], metavar="N,...")
    parser.add_argument("--rounds", type=int, default=3, help="of all loads, the variants in turns")
    parser.add_argument("--at-once", type=int, default=8, metavar="N", help="engines that the GPU has room for")
    options = parser.parse_args()
    if unknown := [name for name in options.variants if name not in VARIANTS]:
        parser.error(f"unknown variants {unknown}: there are {list(VARIANTS)}")
    model, batches, scale, settings = options.model, options.batches, 1, {"max_num_seqs": max(options.batches)}
    if options.smoke:
        model, batches, scale, settings = engines.SMOKE_MODEL, [1, 2], 64, engines.SMOKE_SETTINGS
        options.variants = [name for name, variant in VARIANTS.items() if variant.on_cpu]
    others = [name for name in options.variants if name != ALL_ON]
    together = max(1, options.at_once - 1)
    budget = Budget(options.time_limit_s)
    runs: Runs = {}
    result: dict[str, Any] = {"model": model, "runs": runs, "errors": []}
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(model, Path(root))
        if not options.smoke:
            settings |= engines.share_of_gpu(_KV_TOKENS * kv_bytes_per_token(folder))
        for first in range(0, len(others) or 1, together):
            names = [ALL_ON, *others[first : first + together]]
            arguments = (folder, names, settings, batches, options.rounds, scale)
            take(arguments, len(names), budget, Record(runs, result, options.out))
    result["medians"] = show(model, runs)
    save(options.out, result)
    return int(bool(result["errors"]))


def take(arguments: tuple[Any, ...], starts: int, budget: Budget, record: Record) -> None:
    """Measure variants that hold the GPU together; the first parts are of their `starts`."""

    def keep(parts: Iterator[dict[str, Any]], kind: str) -> None:
        while budget.allows(kind):
            with budget.spending(kind):
                part = next(parts, None)
            if part is None:
                return
            if "error" in part:
                record.fail(part["name"], part["error"])
            else:
                record.keep(part["name"], part["figures"])

    with Isolated(measure, *arguments) as process:
        parts = process.parts(budget.left_s)
        try:
            keep(islice(parts, starts), "a start")
            with measuring():
                keep(parts, "a load")
        except IsolationError as error:
            record.fail("measuring", error)


def show(model: str, runs: Runs) -> dict[str, dict[str, float]]:
    """Medians, and beside each by how much the mechanism helps: above 1 it does. Returns the medians."""
    medians = medians_of(runs)
    all_on = {key: value for key, value in medians.get(ALL_ON, {}).items() if key != "start s"}
    rows = []
    for name, found in medians.items():
        cells: list[Any] = [name]
        for key in all_on:
            gain = key in found and (all_on[key] / found[key] if is_rate(key) else found[key] / all_on[key])
            cells += [found.get(key), gain if key in found else None]
        rows.append(cells)
    print_table([model, *(head for key in all_on for head in (key, "helps"))], rows)
    return medians


if __name__ == "__main__":
    raise SystemExit(main())
