"""Every mechanism off, one at a time: all-on and minus-one for batch 1, 32, 256 and a mixed trace.

    python benchmarks/ablations.py --model qwen3-0.6b --out FILE

The trace: requests of four families that share a beginning, short and long, half of them sampled, all at once.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import engines
from common.isolation import isolated
from common.models import model_folder
from common.report import print_table, save, say
from engine_offline import smoke_settings

VARIANTS: dict[str, dict[str, Any]] = {
    "all on": {},
    "no CUDA graphs": {"enforce_eager": True},
    "no step ahead": {"step_depth": 0},
    "no prefix cache": {"enable_prefix_caching": False},
    "prefill in chunks of 512": {"long_prefill_token_threshold": 512},
    "flash-attn for prompts": {"attention_backend": "flash"},
    "pages of 16": {"page_size": 16},
    "no kernels (torch)": {"attention_backend": "torch"},
}
ON_CPU = ("all on", "no step ahead")


def measure(model: str, settings: dict[str, Any], batches: list[int], scale: int) -> dict[str, Any]:
    """Milliseconds a token by batch, and seconds of the trace; lengths are divided by `scale`."""
    engine = engines.load("ours", model, settings)
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
    timed([prompt(100)] * 4, [8] * 4)
    found: dict[str, Any] = {}
    for batch in batches:
        first = timed([prompt(512) for _ in range(batch)], [1] * batch)
        found[f"itl ms bs {batch}"] = (
            (timed([prompt(512) for _ in range(batch)], [steps + 1] * batch) - first) / steps * 1e3
        )
        say(f"  batch {batch}: {found[f'itl ms bs {batch}']:.3f} ms a token")
    families = [prompt(1024) for _ in range(4)]
    count = 256 // scale
    prompts = [dice.choice(families) + prompt(dice.randint(20, 400)) for _ in range(count)]
    limits = [max(1, dice.randint(16, 256) // scale) for _ in range(count)]
    halves = [(prompts[part::2], limits[part::2], temperature) for part, temperature in ((0, 0.0), (1, 0.8))]
    took = sum(timed(*half) for half in halves)
    found["trace tok_s"] = sum(limits) / took
    say(f"  trace: {found['trace tok_s']:,.0f} tokens a second")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--variants", default=",".join(VARIANTS), metavar="NAME,...")
    parser.add_argument("--batches", default="1,32,256", metavar="N,...")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="the demo model on a CPU, tiny loads: does it run?")
    options = parser.parse_args()
    wanted = list(ON_CPU) if options.smoke else options.variants.split(",")
    if unknown := [name for name in wanted if name not in VARIANTS]:
        parser.error(f"unknown variants {unknown}: there are {list(VARIANTS)}")
    batches = [1, 2] if options.smoke else [int(text) for text in options.batches.split(",")]
    scale = 64 if options.smoke else 1
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    result: dict[str, Any] = {"model": "demo" if options.smoke else options.model, "runs": runs}
    with tempfile.TemporaryDirectory() as root:
        for _ in range(options.repeats):
            for name in wanted:
                say(name)
                settings = smoke_settings() if options.smoke else {"max_num_seqs": max(batches)}
                folder = model_folder(result["model"], Path(root))
                runs[name].append(isolated(measure, folder, settings | VARIANTS[name], batches, scale))
                save(options.out, result)
    good = {name: [run for run in found if "error" not in run] for name, found in runs.items()}
    medians = {
        name: {key: median(run[key] for run in found) for key in found[0]} for name, found in good.items() if found
    }
    all_on = medians.get("all on", {})
    result["medians"] = medians
    keys = list(all_on)
    rows = [
        [name, *(value for key in keys for value in (figures[key], figures[key] / all_on[key]))]
        for name, figures in medians.items()
    ]
    print_table([result["model"], *(head for key in keys for head in (key, "x"))], rows)
    save(options.out, result)
    return int(any("error" in run for found in runs.values() for run in found))


if __name__ == "__main__":
    raise SystemExit(main())
