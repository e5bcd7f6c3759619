"""Policies of eviction: throughput of long prompts in the same KV cache, and what compacting a prompt costs.

    python benchmarks/kv_policies.py --model llama-3.1-8b --prompt 16384 --output 1024 --budget 2048 --out FILE

One engine with random weights serves the same number of prompts at once under each policy, which requests choose. All
prompts differ. The KV cache has room for a few whole prompts; with a policy it has room for more sequences that decode.
`first token` is one prompt alone: its difference to `full` is the cost of scores and copies.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common.models import model_folder, vocabulary
from common.report import log_line, make_parser, print_table, save, words

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core_process.build import BuiltEngine, build_engine

_SMOKE = {
    "model": "tiny", "prompt": 200, "output": 20, "budget": 80, "requests": 6, "kv_cache_memory": "2MB", "alone": 1,
}  # fmt: skip


def main() -> None:
    """Measures, prints a table, and writes a JSON file."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--policy", default="full,snapkv,streaming-llm", help="policies, with commas")
    parser.add_argument("--prompt", type=int, default=16384, metavar="TOKENS")
    parser.add_argument("--output", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--budget", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--requests", type=int, default=32, metavar="N")
    parser.add_argument("--alone", type=int, default=5, metavar="N", help="prompts one at a time, for first tokens")
    parser.add_argument("--kv-cache-memory", default="12GB", metavar="SIZE")
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(_SMOKE)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        engine, largest = open_engine(args, Path(folder))
        for policy in words(args.policy):
            found[policy] = measure(args, engine, policy, largest)
            log_line(f"{policy}: {found[policy]}")
            save(args.out, vars(args) | {"out": str(args.out), "policies": found})
    names = ("output tokens/s", "all tokens/s", "seconds", "most running", "preemptions", "first token ms")
    base = found.get("full", {}).get("output tokens/s", float("nan"))
    rows = [(policy, *(row[name] for name in names), row["output tokens/s"] / base) for policy, row in found.items()]
    print_table(("policy", *names, "x full"), rows)


def open_engine(args: argparse.Namespace, folder: Path) -> tuple[Engine, int]:
    """Starts an engine in this process. Returns it and the size of its vocabulary."""
    path = model_folder(args.model, folder)
    settings = EngineSettings(
        model=path,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=args.prompt + args.output,
        kv_cache_memory=args.kv_cache_memory if isinstance(args.kv_cache_memory, int) else size(args.kv_cache_memory),
        enable_prefix_caching=False,
        **({"device": "cpu", "dtype": "float32", "max_num_seqs": 8} if args.smoke else {}),
    )
    built = build_engine(settings, record_events=False)
    assert isinstance(built, BuiltEngine)
    return built.engine, vocabulary(path)


def size(text: str) -> int:
    """Returns the bytes of a size such as 12GB."""
    return int(float(text.removesuffix("GB").removesuffix("MB")) * (1e9 if text.endswith("GB") else 1e6))


def measure(args: argparse.Namespace, engine: Engine, policy: str, largest: int) -> dict[str, float]:
    """Returns the figures of one policy: prompts one at a time, then all at once."""
    dice = random.Random(7)
    fields: dict[str, Any] = {} if policy == "full" else {"kv_policy": policy, "kv_budget": args.budget}

    def requests(count: int, output: int) -> list[Request]:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, **fields)
        return [
            Request(
                request_id=f"{policy}-{dice.random()}",
                prompt_token_ids=[dice.randrange(3, largest) for _ in range(args.prompt)],
                sampling=params,
            )
            for _ in range(count)
        ]

    firsts = [run(engine, [one])["first token ms"] for one in requests(args.alone + 1, 2)]
    made = run(engine, requests(args.requests, args.output))
    return made | {"first token ms": median(firsts[1:])}  # the first compiles or sizes something


def run(engine: Engine, requests: list[Request]) -> dict[str, float]:
    """Serves requests at once, and returns times and counts."""
    preemptions, most, first_s, num_output = engine.stats().preemptions, 0, 0.0, 0
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            num_output += len(output.token_ids)
            first_s = first_s or time.perf_counter() - began
        most = max(most, len(engine.scheduler.running))
    seconds = time.perf_counter() - began
    num_all = num_output + sum(len(request.prompt_token_ids) for request in requests)
    return {
        "output tokens/s": num_output / seconds,
        "all tokens/s": num_all / seconds,
        "seconds": seconds,
        "most running": float(most),
        "preemptions": float(engine.stats().preemptions - preemptions),
        "first token ms": 1000 * first_s,
    }


if __name__ == "__main__":
    main()
