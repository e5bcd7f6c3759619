"""Every mechanism off, one at a time: all-on and minus-one for batch 1, 32, 256 and a mixed trace.

    python benchmarks/ablations.py --model qwen2.5-1.5b --out FILE

Variants start several at a time, each in a process of its own; one at a time then runs all loads, the others wait; so
`--rounds` times, for two processes of the same engine differ by up to 4 %. Figures are medians over rounds. What is
twice as slow as all-on is not measured again.

The trace: requests of four families that share a beginning, short and long, half of them sampled, all at once. What has
a flag of the engine is switched off by it; the rest, which no user should want off, at the line of code that uses it.
Chunked prefill shows in interference.py; what is the server's mechanism (a process of its own, tokens in batches) in
engine_serving.py.
"""

import importlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from common import engines
from common.budget import Budget
from common.models import kv_bytes_per_token, model_folder
from common.quiet import measuring
from common.report import Runs, integers, make_parser, medians_of, print_table, save, say, words
from common.targets import is_rate
from common.turns import Turns

_ENGINE = "mini_infer_engine"
_RUNNER = f"{_ENGINE}.graph_runner"


@dataclass(frozen=True, slots=True)
class Variant:
    """What is off, and how."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Flags of the engine."""
    replaced: dict[tuple[str, str], Callable[[Any], Any]] = field(default_factory=dict)
    """(module, name in it) and what is made of what stands there."""
    on_cpu: bool = False
    """Whether a smoke run can show it."""


_KV_TOKENS = 180_000
"""More than any load holds at a time."""


def _unsplit(plan: Callable[..., Any]) -> Callable[..., Any]:
    """One program for each row and KV head."""
    from mini_infer_engine.kernels.decode_plan import DecodeCut

    return partial(plan, cut=DecodeCut(target_programs=0, programs_a_row=1.0))


VARIANTS = {
    "all on": Variant(on_cpu=True),
    "no step ahead": Variant({"step_depth": 0}, on_cpu=True),
    "no prefix cache": Variant({"enable_prefix_caching": False}, on_cpu=True),
    "no CUDA graphs": Variant({"enforce_eager": True}),
    "no graphs of prompts": Variant(replaced={(_RUNNER, "prefill_buckets"): lambda buckets: lambda *_: []}),
    "prompts and decodes in one graph": Variant(
        replaced={(f"{_ENGINE}.graphs", "is_launch_bound"): lambda rule: lambda *_: False}
    ),
    "no skinny products and norms in them": Variant(replaced={(f"{_ENGINE}.fused", "MAX_ROWS"): lambda rows: 0}),
    "no kernels launched ahead": Variant(
        replaced={
            (f"{_ENGINE}.fused", "has_our_gluon"): lambda rule: lambda device: False,
            (f"{_ENGINE}.kernels.decode_attention", "has_our_gluon"): lambda rule: lambda device: False,
        }
    ),
    "no split of decode attention": Variant(replaced={(_RUNNER, "plan_decode"): _unsplit}),
    "flash-attn for prompts": Variant({"attention_backend": "flash"}),
    "pages of 16": Variant({"page_size": 16}),
    "chunks of 512": Variant({"long_prefill_token_threshold": 512}),
    "torch for kernels and graphs": Variant({"attention_backend": "torch"}),
}


def measure(
    model: str, name: str, settings: dict[str, Any], batches: list[int], scale: int
) -> Iterator[dict[str, Any]]:
    """Seconds of its start; then again and again milliseconds a token by batch, tokens a second of the trace, {}.

    Lengths are divided by `scale`.
    """
    variant = VARIANTS[name]
    for (module_name, attribute), change in variant.replaced.items():
        module = importlib.import_module(module_name)
        setattr(module, attribute, change(getattr(module, attribute)))
    begin = time.perf_counter()
    engine = engines.load("ours", model, settings | variant.settings)
    yield {"start s": time.perf_counter() - begin}
    vocabulary = 150_000 if scale == 1 else 4000
    dice = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [dice.randrange(vocabulary) for _ in range(max(1, length // scale))]

    def timed(prompts: list[list[int]], limits: list[int], temperature: float = 0.0) -> float:
        begin = time.perf_counter()
        made = engine.run(prompts, limits, temperature)
        assert made == sum(limits)
        return time.perf_counter() - begin

    steps = 128 // scale
    for temperature in (0.0, 0.8):
        timed([prompt(100) for _ in range(4)], [8] * 4, temperature)
    while True:
        for batch in batches:
            first_s = timed([prompt(512) for _ in range(batch)], [1] * batch)
            whole_s = timed([prompt(512) for _ in range(batch)], [steps + 1] * batch)
            yield {f"itl ms bs {batch}": (whole_s - first_s) / steps * 1e3}
        families = [prompt(1024) for _ in range(4)]
        count = 256 // scale
        prompts = [dice.choice(families) + prompt(dice.randint(20, 400)) for _ in range(count)]
        limits = [max(1, dice.randint(16, 256) // scale) for _ in range(count)]
        halves = [(prompts[part::2], limits[part::2], temperature) for part, temperature in ((0, 0.0), (1, 0.8))]
        yield {"trace tok_s": sum(limits) / sum(timed(*half) for half in halves)}
        yield {}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--variants", type=words, default=list(VARIANTS), metavar="NAME,...")
    parser.add_argument("--batches", type=integers, default=[1, 32, 256], metavar="N,...")
    parser.add_argument("--rounds", type=int, default=3, help="of all loads, the variants in turns")
    parser.add_argument("--at-once", type=int, default=6, metavar="N", help="variants that hold the GPU together")
    options = parser.parse_args()
    if unknown := [name for name in options.variants if name not in VARIANTS]:
        parser.error(f"unknown variants {unknown}: there are {list(VARIANTS)}")
    model, batches, scale, settings = options.model, options.batches, 1, {"max_num_seqs": max(options.batches)}
    if options.smoke:
        model, batches, scale, settings = engines.SMOKE_MODEL, [1, 2], 64, engines.SMOKE_SETTINGS
        options.variants = [name for name, variant in VARIANTS.items() if variant.on_cpu]
    budget = Budget(options.time_limit_s)
    runs: Runs = {}
    result: dict[str, Any] = {"model": model, "runs": runs, "errors": []}
    with tempfile.TemporaryDirectory() as root:
        folder = model_folder(model, Path(root))
        if not options.smoke:
            settings |= engines.share_of_gpu(_KV_TOKENS * kv_bytes_per_token(folder))
        for first in range(0, len(options.variants), options.at_once):
            if budget.allows("variants"):
                names = options.variants[first : first + options.at_once]
                with budget.spending("variants"):
                    processes = {name: (folder, name, settings, batches, scale) for name in names}
                    measure_in_turns(processes, options.rounds, budget, options.out, result)
    result["medians"] = show(model, runs)
    save(options.out, result)
    return int(bool(result["errors"]))


def measure_in_turns(
    arguments: dict[str, tuple[Any, ...]], rounds: int, budget: Budget, out: Path | None, result: dict[str, Any]
) -> None:
    """Start variants at once, let one at a time run the loads; what one has measured is kept at once."""
    runs: Runs = result["runs"]
    turns = Turns(runs, result, out)
    with ExitStack() as stack:
        processes = turns.start(stack, {name: (measure, *given) for name, given in arguments.items()}, budget)
        stack.enter_context(measuring())
        for round_ in range(rounds):
            for name, process in list(processes.items())[:: -1 if round_ % 2 else 1]:
                say(f"{name}, round {round_ + 1}")
                one_round = takewhile(bool, process.parts(budget.left_s))
                if not turns.take(name, one_round) or is_hopeless(name, runs):
                    del processes[name]


def is_hopeless(name: str, runs: Runs) -> bool:
    """Whether it is so much slower than all-on that one round tells."""
    medians = medians_of(runs)
    all_on = medians.get("all on", {})
    ratios = [value / all_on[figure] for figure, value in medians[name].items() if figure in all_on and "itl" in figure]
    return max(ratios, default=0.0) > 2


def show(model: str, runs: Runs) -> dict[str, dict[str, float]]:
    """Medians, and beside each by how much the mechanism helps: above 1 it does. Returns the medians."""
    medians = medians_of(runs)
    all_on = {key: value for key, value in medians.get("all on", {}).items() if key != "start s"}
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
