"""Long contexts of a model with sliding windows, with KV groups and with one page table for all layers, in one process.

    python benchmarks/kv_groups.py --model gemma-3-1b --prompt 16384 --requests 40 --kv-bytes 4e9 --out FILE

Both engines have equally much KV memory. They run one request alone, and then all together, in turns; the better round
counts. A table has tokens per second, the most sequences that ran at a time, preemptions, the time to the first token,
and the most memory that one sequence took.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from common.models import model_folder, vocabulary
from common.report import make_parser, print_table, save

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner

_SMOKE = {"model": "tiny-window", "prompt": 200, "output": 20, "requests": 4, "kv_bytes": 4e5, "rounds": 1}


def main() -> None:
    """Measures, prints a table, and writes a JSON file."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="gemma-3-1b")
    parser.add_argument("--prompt", type=int, default=16_384, help="tokens")
    parser.add_argument("--output", type=int, default=512, help="tokens")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--kv-bytes", type=float, default=4e9)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(_SMOKE)
    ends = time.perf_counter() + args.time_limit_s
    layouts: dict[str, dict[str, Any]] = {}
    result = {"model": args.model, "prompt": args.prompt, "output": args.output, "kv bytes": args.kv_bytes}
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(args.model, Path(folder))
        engines = {name: start(path, args, uniform=name == "one table") for name in ("groups", "one table")}
        for name, (engine, runner) in engines.items():
            page_bytes = runner.pool.spec.page_bytes
            layouts[name] = {"pages": runner.num_pages, "page bytes": page_bytes, "groups": str(runner.kv_cache)}
            alone = [run(engine, requests_of(path, args, 1)) for _ in range(2)]
            layouts[name] |= {"alone": best(alone), "rounds": []}
            layouts[name]["bytes of one"] = round(alone[0]["most of the pool"] * runner.num_pages) * page_bytes
        for _ in range(args.rounds):
            for name, (engine, _) in engines.items():
                if not layouts[name]["rounds"] or time.perf_counter() < ends:
                    layouts[name]["rounds"].append(run(engine, requests_of(path, args, args.requests)))
                save(args.out, result | {"layouts": layouts})
    report(layouts)


def start(path: str, args: argparse.Namespace, *, uniform: bool) -> tuple[Engine, ModelRunner]:
    """Starts an engine in this process."""
    settings = EngineSettings(
        model=path,
        load_format="dummy",
        device="cpu" if args.smoke else "auto",
        max_model_len=args.prompt + args.output,
        max_num_seqs=64,
        kv_cache_memory=int(args.kv_bytes),
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=uniform,
    )
    runner = load_runner(settings)
    return Engine(runner.settings, runner, (), runner.max_model_len, "revision", record_events=False), runner


def requests_of(path: str, args: argparse.Namespace, count: int) -> list[Request]:
    """Returns requests with random prompts of nearly one length, always the same."""
    dice, largest = random.Random(count), vocabulary(path)
    params = SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True)
    lengths = [args.prompt - dice.randrange(64) for _ in range(count)]
    prompts = [[dice.randrange(3, largest) for _ in range(length)] for length in lengths]
    return [
        Request(request_id=str(index), prompt_token_ids=prompt, sampling=params) for index, prompt in enumerate(prompts)
    ]


def run(engine: Engine, requests: list[Request]) -> dict[str, float]:
    """Runs the requests together."""
    began, before = time.perf_counter(), engine.stats().preemptions
    made, running, used = 0, 0, 0.0
    first: dict[str, float] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            made += len(output.token_ids)
            first.setdefault(output.request_id, time.perf_counter() - began)
        running = max(running, len(engine.scheduler.running))
        used = max(used, engine.scheduler.kv_cache.usage)
    return {
        "output tok/s": made / (time.perf_counter() - began),
        "most running": running,
        "preemptions": engine.stats().preemptions - before,
        "mean TTFT s": sum(first.values()) / len(first),
        "most of the pool": used,
    }


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Returns the quickest round."""
    return max(rounds, key=lambda one: one["output tok/s"])


def report(layouts: dict[str, dict[str, Any]]) -> None:
    """Prints both layouts side by side."""
    rows = [("alone, output tok/s", *(one["alone"]["output tok/s"] for one in layouts.values()))]
    rows.append(("MB of one sequence", *(one["bytes of one"] / 1e6 for one in layouts.values())))
    rounds = [best(one["rounds"]) for one in layouts.values()]
    rows += [(name, *(one[name] for one in rounds)) for name in rounds[0]]
    print_table(("", *layouts, "groups / one table"), [(*row, row[1] / row[2] if row[2] else None) for row in rows])


if __name__ == "__main__":
    main()
