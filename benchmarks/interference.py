"""What a long prompt does to those who decode: gaps between tokens while it is prefilled, beside quiet ones.

    python benchmarks/interference.py --models qwen2.5-7b,qwen3-0.6b --out FILE

For each largest prefill chunk (0: the whole prompt in one pass), on one loaded model: 32 sequences decode; long prompts
arrive one by one. The gaps that overlap a prefill are compared with the quiet ones of the same run; the long prompts'
time to the first token and the time of all the work with those of the unchunked run.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.budget import Budget
from common.engines import SETTINGS, SMOKE_MODEL, SMOKE_SETTINGS
from common.isolation import isolated
from common.kernel_times import show_kernel_times
from common.models import model_folder, vocabulary
from common.report import integers, log_line, make_parser, percentile, print_table, save, words
from common.targets import Target, verdict_cells

if TYPE_CHECKING:
    from mini_infer_engine.core.engine import Engine
    from mini_infer_engine.core.request import Request

_TARGETS = {
    "overlap p99 / quiet p99": Target(2.5),
    "overlap p99 / quiet p50": Target(2.5),
    "long ttft / whole": Target(1.3),
    "throughput / whole": Target(0.95, at_least=True),
}
_WARM_UP_TOKENS = 150


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of the engine."""

    decoding: int = 32
    prompt: int = 128
    output: int = 900
    long_prompt: int = 8192
    long_prompts: int = 5
    quiet_steps: int = 100
    """Tokens of each decoding sequence between two long prompts."""
    vocabulary: int = 150_000


SMOKE = Work(decoding=3, prompt=8, output=60, long_prompt=200, long_prompts=2, quiet_steps=10, vocabulary=4000)
Span = tuple[float, float]


def measure(settings: dict[str, Any], work: Work, chunks: list[int], profiled: list[int]) -> Iterator[dict[str, Any]]:
    """Figures by chunk; one model for all, a new engine around it for each."""
    from mini_infer_engine.config.options.settings import EngineSettings
    from mini_infer_engine.core.engine import Engine
    from mini_infer_engine.runtime.model_runner import load_runner

    runner = load_runner(EngineSettings(**settings))
    dice = random.Random(0)
    whole: dict[str, Any] = {}
    for chunk in chunks:
        engine_settings = EngineSettings(**settings | {"long_prefill_token_threshold": chunk})
        engine = Engine(engine_settings, runner, (), runner.max_model_len, "", record_events=False)
        run(engine, replace(work, long_prompts=1, output=min(work.output, _WARM_UP_TOKENS)), dice)
        found = figures(*run(engine, work, dice))
        if not chunk:
            whole = found
        if whole:
            found["long ttft / whole"] = found["long ttft ms"] / whole["long ttft ms"]
            found["throughput / whole"] = whole["all work s"] / found["all work s"]
        gaps = " ".join(f"{gap:.1f}" for gap in found["last prompt's gaps ms"])
        log_line(
            f"  chunks of {chunk or 'the whole'}: overlap p99 {found['overlap p99 ms']:.2f} ms, the last's: {gaps}"
        )
        if chunk in profiled:
            profile(engine, work, chunk, dice)
        yield {str(chunk): found}


def profile(engine: "Engine", work: Work, chunk: int, dice: random.Random) -> None:
    """Show the kernels of passes with chunks from the middle of a long prompt."""
    for index in range(work.decoding):
        engine.add(request(work, dice, f"decode{index}", work.prompt, work.output))
    for _ in range(_WARM_UP_TOKENS):
        engine.step()
    engine.add(request(work, dice, "long", work.long_prompt, 1))
    for _ in range(work.long_prompt // chunk // 2):
        engine.step()
    show_kernel_times(engine.step, passes=3)
    for name in ("long", *(f"decode{index}" for index in range(work.decoding))):
        engine.abort(name)
    while engine.has_work:
        engine.step()


def request(work: Work, dice: random.Random, name: str, length: int, output: int) -> "Request":
    """Of random tokens. To draw a long prompt takes as long as a step: not while gaps are measured."""
    from mini_infer_engine.core.request import Request, SamplingParams

    token_ids = [dice.randrange(work.vocabulary) for _ in range(length)]
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=token_ids, sampling=sampling)


def run(engine: "Engine", work: Work, dice: random.Random) -> tuple[float, list[Span], list[Span]]:
    """Seconds in all; (begin, end) of each gap once all decode; (arrival, first token) of the long prompts.

    The engine is stepped by hand, so that every token has its time.
    """
    gaps: list[Span] = []
    long: list[Span] = []
    last: dict[str, float] = {}
    arrived, made, made_at_arrival = 0.0, 0, 0
    all_decode_since = float("inf")
    for index in range(work.decoding):
        engine.add(request(work, dice, f"decode{index}", work.prompt, work.output))
    waiting = [request(work, dice, "long", work.long_prompt, 1) for _ in range(work.long_prompts)]
    begin = time.perf_counter()
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id == "long":
                long.append((arrived, now))
                arrived, made_at_arrival = 0.0, made
                continue
            made += 1
            if (before := last.get(output.request_id, 0.0)) >= all_decode_since:
                gaps.append((before, now))
            last[output.request_id] = now
        if len(last) == work.decoding:
            all_decode_since = min(all_decode_since, now)
        due = len(last) == work.decoding and made - made_at_arrival >= work.quiet_steps * work.decoding
        if due and not arrived and waiting:
            arrived = time.perf_counter()
            engine.add(waiting.pop())
    assert len(long) == work.long_prompts, f"{len(long)} long prompts found their place: give --output more"
    return time.perf_counter() - begin, gaps, long


def figures(took_s: float, gaps: list[Span], long: list[Span]) -> dict[str, Any]:
    """What is shown of one run; the gaps around the last long prompt one by one, for all who decode have the same."""
    during = set(overlapping(gaps, long))
    spans = {
        "quiet": [gap for gap in gaps if gap not in during],
        "overlap": [gap for gap in gaps if gap in during],
    }
    found: dict[str, Any] = {
        f"{name} p{share} ms": percentile([end - begin for begin, end in of_name], share / 100) * 1e3
        for name, of_name in spans.items()
        for share in (50, 99)
    }
    return found | {
        "overlap p99 / quiet p99": found["overlap p99 ms"] / found["quiet p99 ms"],
        "overlap p99 / quiet p50": found["overlap p99 ms"] / found["quiet p50 ms"],
        "long ttft ms": percentile([done - came for came, done in long], 0.5) * 1e3,
        "all work s": took_s,
        "last prompt's gaps ms": [
            round((end - begin) * 1e3, 2) for begin, end in sorted(set(overlapping(gaps, long[-1:])))
        ],
    }


def overlapping(gaps: list[Span], long: list[Span]) -> list[Span]:
    """The gaps in which a long prompt waited or was computed."""
    return [(begin, end) for begin, end in gaps if any(begin < done and end > came for came, done in long)]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=words, default=words("qwen2.5-7b,qwen3-0.6b"), metavar="NAME,...")
    parser.add_argument(
        "--chunks", type=integers, default=[0, 224, 352, 480, 992], metavar="TOKENS,...", help="0, the whole, first"
    )
    parser.add_argument(
        "--profile", type=integers, default=[], metavar="TOKENS,...", help="show the kernels of passes with such chunks"
    )
    for name, default in asdict(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    options = parser.parse_args()
    budget = Budget(options.time_limit_s)
    work = SMOKE if options.smoke else Work(**{name: getattr(options, name) for name in asdict(Work())})
    models, chunks = ([SMOKE_MODEL], [0, 64]) if options.smoke else (options.models, options.chunks)
    shown: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"work": asdict(work), "chunks": shown}
    failed = False
    with tempfile.TemporaryDirectory() as root:
        for model in models:
            if not budget.allows("a model"):
                continue
            log_line(model)
            folder = model_folder(model, Path(root))
            fitted = replace(work, vocabulary=vocabulary(folder, work.vocabulary))
            settings: dict[str, Any] = SETTINGS | {
                "model": folder,
                "max_num_seqs": work.decoding + 1,
                "max_num_batched_tokens": max(8192, work.long_prompt + work.decoding),
                "enable_prefix_caching": False,
            }
            settings |= SMOKE_SETTINGS if options.smoke else {}
            found = shown.setdefault(model, {})

            def note(part: dict[str, Any]) -> None:
                found.update(part)
                save(options.out, result)

            with budget.spending("a model"):
                failed |= "error" in isolated(
                    measure, settings, fitted, chunks, options.profile, timeout_s=budget.left_s, note=note
                )
            show(model, found)
    return int(failed)


def show(model: str, found: dict[str, dict[str, Any]]) -> None:
    """A column for each chunk; under a figure with a target, whether it is kept."""
    rows: list[list[Any]] = []
    for name in next(iter(found.values()), {}):
        values = [figures.get(name) for figures in found.values()]
        if isinstance(values[0], list):
            continue
        target = _TARGETS.get(name)
        rows.append([name, *values, target and str(target)])
        if target:
            rows.append(["", *(verdict_cells(target, value)[1] for value in values), None])
    print_table([f"{model}, chunk", *(chunk if chunk != "0" else "whole" for chunk in found), "target"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
