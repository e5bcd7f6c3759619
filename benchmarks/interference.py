"""What a long prompt does to those who decode: gaps between tokens while it is prefilled, beside quiet ones.

    python benchmarks/interference.py --model qwen2.5-7b --out FILE

For each largest prefill chunk (0: the whole prompt in one pass), in a process of its own: 32 sequences decode; long
prompts arrive one by one. The gaps that overlap a prefill are compared with the quiet ones of the same run; the long
prompts' time to the first token and the time of all the work with those of the unchunked run.
"""

import argparse
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.engines import CONTEXT_TOKENS, MEMORY_SHARE
from common.isolation import isolated
from common.models import model_folder
from common.report import percentile, print_table, save, say
from engine_offline import smoke_settings


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of the engine."""

    decoding: int = 32
    prompt: int = 128
    output: int = 1200
    long_prompt: int = 8192
    long_prompts: int = 6
    quiet_steps: int = 100
    """Tokens of each decoding sequence between two long prompts."""
    vocabulary: int = 150_000


SMOKE = Work(decoding=3, prompt=8, output=60, long_prompt=200, long_prompts=2, quiet_steps=10, vocabulary=4000)


def measure(settings: dict[str, Any], work: Work) -> dict[str, Any]:
    """One engine, stepped by hand so that every token has its time."""
    from mini_infer_engine.build import build_engine
    from mini_infer_engine.request import Request, SamplingParams
    from mini_infer_engine.settings import EngineSettings

    engine = build_engine(EngineSettings(**settings)).engine
    dice = random.Random(0)

    def request(name: str, length: int, output: int) -> Request:
        token_ids = [dice.randrange(work.vocabulary) for _ in range(length)]
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        return Request(request_id=name, prompt_token_ids=token_ids, sampling=sampling)

    def run(long_prompts: int) -> tuple[float, list[tuple[float, float]], list[tuple[float, float]]]:
        """Seconds in all; (begin, end) of each gap of those who decode; (arrival, first token) of the long prompts."""
        gaps: list[tuple[float, float]] = []
        long: list[tuple[float, float]] = []
        last: dict[str, float] = {}
        arrived, made_at_arrival = 0.0, 0
        for index in range(work.decoding):
            engine.add(request(f"decode{index}", work.prompt, work.output))
        begin, made = time.perf_counter(), 0
        while engine.has_work:
            outputs = engine.step()
            engine.take_events()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id.startswith("long"):
                    long.append((arrived, now))
                    arrived, made_at_arrival = 0.0, made
                    continue
                made += 1
                if (before := last.get(output.request_id)) is not None:
                    gaps.append((before, now))
                last[output.request_id] = now
            due = len(last) == work.decoding and made - made_at_arrival >= work.quiet_steps * work.decoding
            if due and not arrived and len(long) < long_prompts:
                engine.add(request(f"long{len(long)}", work.long_prompt, 1))
                arrived = time.perf_counter()
        return time.perf_counter() - begin, gaps, long

    run(1)  # warms up
    took, gaps, long = run(work.long_prompts)
    overlapping = [end - begin for begin, end in gaps if any(begin < done and end > came for came, done in long)]
    quiet = [end - begin for begin, end in gaps if not any(begin < done and end > came for came, done in long)]
    assert len(long) == work.long_prompts, f"{len(long)} long prompts found their place: give --output more"
    return {
        "quiet p50 ms": percentile(quiet, 0.5) * 1e3,
        "quiet p99 ms": percentile(quiet, 0.99) * 1e3,
        "overlap p50 ms": percentile(overlapping, 0.5) * 1e3,
        "overlap p99 ms": percentile(overlapping, 0.99) * 1e3,
        "overlap p99 / quiet p50": percentile(overlapping, 0.99) / percentile(quiet, 0.5),
        "overlap p99 / quiet p99": percentile(overlapping, 0.99) / percentile(quiet, 0.99),
        "long ttft ms": percentile([done - came for came, done in long], 0.5) * 1e3,
        "all work s": took,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument(
        "--chunks", default="0,256,512,1024,2048", metavar="TOKENS,...", help="0, the whole, comes first"
    )
    for name, default in asdict(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="the demo model on a CPU, tiny loads: does it run?")
    options = parser.parse_args()
    work = SMOKE if options.smoke else Work(**{name: getattr(options, name) for name in asdict(Work())})
    chunks = [0, 64] if options.smoke else [int(text) for text in options.chunks.split(",")]
    found: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {
        "model": "demo" if options.smoke else options.model,
        "work": asdict(work),
        "chunks": found,
    }
    with tempfile.TemporaryDirectory() as root:
        for chunk in chunks:
            say(f"chunks of {chunk or 'the whole prompt'}")
            settings: dict[str, Any] = {
                "model": model_folder(result["model"], Path(root)),
                "load_format": "dummy",
                "max_model_len": CONTEXT_TOKENS,
                "gpu_memory_utilization": MEMORY_SHARE,
                "max_num_seqs": work.decoding + 1,
                "long_prefill_token_threshold": chunk,
                "enable_prefix_caching": False,
            }
            if options.smoke:
                settings |= smoke_settings()
            found[str(chunk)] = isolated(measure, settings, work)
            save(options.out, result)
    good = {chunk: figures for chunk, figures in found.items() if "error" not in figures}
    whole = good.get("0")
    for figures in good.values() if whole else ():
        figures["ttft / whole"] = figures["long ttft ms"] / whole["long ttft ms"]
        figures["throughput / whole"] = whole["all work s"] / figures["all work s"]
    names = list(next(iter(good.values()), {}))
    print_table(
        [f"{result['model']}, chunk", *good], [[name, *(figures[name] for figures in good.values())] for name in names]
    )
    save(options.out, result)
    return int(len(good) < len(found))


if __name__ == "__main__":
    raise SystemExit(main())
