"""Long contexts of a model with sliding windows, with KV groups and with one page table for all layers, in one process.

    python benchmarks/kv_groups.py --model gemma-3-1b --prompt 16384 --requests 64 --kv-bytes 4e9 --out FILE

Both engines have equally much KV memory and run the same requests; each runs the load twice, alternately, and the
better of the two counts. It reports tokens per second, the most sequences that ran at a time, preemptions, and the
share of the pool that one sequence takes.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from common.models import CONFIGS, model_folder

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.runtime.model_runner import ModelRunner, load_runner


def run(engine: Engine, requests: list[Request]) -> dict[str, Any]:
    """Runs the requests together."""
    for request in requests:
        engine.add(request)
    before = engine.stats().preemptions
    made, most_running, most_used, first = 0, 0, 0.0, {}
    began = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            made += len(output.token_ids)
            first.setdefault(output.request_id, time.perf_counter() - began)
        most_running = max(most_running, len(engine.scheduler.running))
        most_used = max(most_used, engine.scheduler.kv_cache.usage)
    seconds = time.perf_counter() - began
    prompts = sum(len(request.prompt_token_ids) for request in requests)
    return {
        "seconds": round(seconds, 3),
        "output tokens/s": round(made / seconds, 1),
        "all tokens/s": round((made + prompts) / seconds, 1),
        "most running": most_running,
        "most of the pool": round(most_used, 4),
        "preemptions": engine.stats().preemptions - before,
        "mean TTFT s": round(sum(first.values()) / len(first), 3),
    }


def requests_of(args: argparse.Namespace, count: int, name: str) -> list[Request]:
    """Random prompts of nearly one length, the same for each name."""
    dice, vocabulary = random.Random(count), int(CONFIGS[args.model]["vocab_size"])
    params = SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True)
    return [
        Request(
            request_id=f"{name}{index}",
            prompt_token_ids=[dice.randrange(3, vocabulary) for _ in range(args.prompt - dice.randrange(64))],
            sampling=params,
        )
        for index in range(count)
    ]


def main() -> None:
    """Measures and prints; with `--out` it also writes a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-1b", choices=sorted(CONFIGS))
    parser.add_argument("--prompt", type=int, default=16_384)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--kv-bytes", type=float, default=4e9)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engines: dict[str, tuple[Engine, ModelRunner]] = {}
    results: dict[str, Any] = {"arguments": {name: str(value) for name, value in vars(args).items()}}
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(args.model, Path(folder))
        for name, uniform in (("groups", False), ("one table", True)):
            began = time.perf_counter()
            settings = EngineSettings(
                model=path,
                load_format="dummy",
                device=args.device,
                max_model_len=args.prompt + args.output,
                max_num_seqs=args.max_num_seqs,
                kv_cache_memory=int(args.kv_bytes),
                enable_prefix_caching=False,
                disable_hybrid_kv_cache_manager=uniform,
            )
            runner = load_runner(settings)
            engine = Engine(runner.settings, runner, (), runner.max_model_len, "revision", record_events=False)
            engines[name] = engine, runner
            results[name] = {
                "start s": round(time.perf_counter() - began, 1),
                "pages": runner.num_pages,
                "page bytes": runner.pool.spec.page_bytes,
                "groups": str(runner.kv_cache),
                "one sequence": [run(engine, requests_of(args, 1, f"{name} alone {turn} ")) for turn in range(2)],
            }
        for round_ in range(args.rounds):
            for name, (engine, _) in engines.items():
                made = run(engine, requests_of(args, args.requests, f"{name} {round_} "))
                results[name].setdefault("rounds", []).append(made)
                print(name, made, flush=True)
        for name in engines:
            result = results[name]
            result["best"] = max(result["rounds"], key=lambda one: one["output tokens/s"])
            print(name, json.dumps({key: value for key, value in result.items() if key != "rounds"}))
    ratio = results["groups"]["best"]["output tokens/s"] / results["one table"]["best"]["output tokens/s"]
    results["ratio"] = round(ratio, 3)
    print("output tokens/s, groups over one table:", results["ratio"])
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
