"""The prefix cache's tiers: what a hit from main memory costs, and what sessions of agents gain at over-commit.

    python benchmarks/kv_tiers.py --model qwen2.5-7b --part hit --out FILE
    python benchmarks/kv_tiers.py --model demo --part sessions --over-commit 2 --out FILE

`hit` measures one prompt at a time: computed, hit on the device, hit in main memory, hit on the disk; and the bytes per
second of copies of whole pages. `sessions` replays recorded sessions of agents in a closed loop: a device's cache that
has room for 1/N of all distinct tokens, the same with main memory, with a disk too, and a device's cache for all. Each
contender runs in a process of its own. Without ../shared/data it draws sessions of its own.
"""

import argparse
import json
import lzma
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common.models import CONFIGS, model_folder, vocabulary
from common.report import make_parser, print_table, save

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core_process.build import BuiltEngine, build_engine

SESSIONS = Path(__file__).parents[2] / "shared" / "data" / "agent_sessions.jsonl.xz"
CONTENDERS = ("device", "host", "host, disk", "all on the device")
_SMOKE = {"model": "demo", "sessions": 2, "tokens_per_block": 4, "lengths": "64,256"}


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    prompt: list[int]
    output: int


def main() -> None:
    """Measures, prints tables, and writes a JSON file."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--part", choices=("hit", "sessions"), default="sessions")
    parser.add_argument("--lengths", default="512,2048,4096,16384", help="tokens of prompts, of `hit`")
    parser.add_argument("--sessions", type=int, default=25, help="of the 25 that are recorded")
    parser.add_argument("--tokens-per-block", type=int, default=64, help="the record has 64")
    parser.add_argument("--over-commit", type=float, default=2.0, help="distinct tokens over the device's cache")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(_SMOKE)
    if args.part == "hit":
        result: dict[str, Any] = hits(args)
    elif args.contender is not None:
        print(json.dumps(replay(args)))
        return
    else:
        result = compare(args)
    save(args.out, {"model": args.model, "part": args.part} | result)


def open_engine(args: argparse.Namespace, folder: Path, **options: Any) -> Engine:
    """Starts an engine in this process."""
    is_named = args.model in CONFIGS
    settings = EngineSettings(
        model=str(model_folder(args.model, folder)) if is_named else args.model,
        load_format="dummy" if is_named else "auto",
        skip_tokenizer_init=True,
        **options,
    )
    built = build_engine(settings, record_events=False)
    assert isinstance(built, BuiltEngine)
    return built.engine


def serve(engine: Engine, prompt: list[int], output: int = 1) -> float:
    """Serves a prompt alone. Returns the seconds to its first token."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    began, first_s = time.perf_counter(), 0.0
    engine.add(Request(request_id=f"{began}", prompt_token_ids=prompt, sampling=params))
    while engine.has_work:
        for made in engine.step():
            assert made.finish_reason != "error", made.error
            first_s = first_s or time.perf_counter() - began
    return first_s


def write_behind(engine: Engine) -> None:
    """Copies to lower tiers all that is to be copied."""
    while engine.write_behind():
        engine._tiers.wait(1.0)


def hits(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the time to the first token of prompts by where their blocks are."""
    lengths = [int(length) for length in args.lengths.split(",")]
    dice, rows, found = random.Random(1), [], {}
    with tempfile.TemporaryDirectory() as folder:
        bounds = {"max_model_len": max(lengths) + 8, "kv_host_memory": 16 << 30}
        disk = {"kv_disk_path": str(Path(folder) / "kv"), "kv_disk_size": 16 << 30}
        if args.smoke or args.model == "demo":
            bounds |= {"kv_host_memory": 1 << 30, "max_model_len": None, "kv_cache_memory": 100_000_000}
        engine = open_engine(args, Path(folder), **bounds, **disk)
        tiers: Any = engine._tiers
        largest = 1000 if args.model == "demo" else vocabulary(str(model_folder(args.model, Path(folder))))
        for length in lengths:
            times: dict[str, list[float]] = defaultdict(list)
            for _ in range(5):
                prompt = [dice.randrange(3, largest) for _ in range(length)]
                times["computed"].append(serve(engine, prompt))
                times["device"].append(serve(engine, prompt))
                write_behind(engine)
                tiers._compute_tokens_per_s, engine._rate.tokens_per_s = 1.0, 1.0  # it is to load, whatever that costs
                engine.scheduler.kv_cache.reset_prefix_cache()
                times["host"].append(serve(engine, prompt))
                engine.scheduler.kv_cache.reset_prefix_cache()
                tiers._host.clear()
                times["disk"].append(serve(engine, prompt))
            row = {name: 1000 * median(values) for name, values in times.items()}
            rows.append((length, *row.values(), row["host"] - row["device"]))
            found[length] = row | {"all": times}
        stats = engine.stats().kv_tiers.tiers
        speeds = {f"{name}, load": counts.loaded_bytes / counts.load_s for name, counts in stats.items()}
        speeds |= {f"{name}, store": counts.stored_bytes / counts.store_s for name, counts in stats.items()}
        print_table(("tokens", "computed ms", "device ms", "host ms", "disk ms", "host - device"), rows)
        print_table(("copies", "GB/s"), [(name, speed / 1e9) for name, speed in speeds.items()])
        print({name: (counts.mismatches, counts.errors) for name, counts in stats.items()})
    return {"hits": found, "bytes per s": speeds}


def sessions_of(args: argparse.Namespace) -> list[list[Turn]]:
    """Returns the sessions, each block of which has random tokens of its own."""
    if SESSIONS.is_file():
        with lzma.open(SESSIONS, "rt") as lines:
            rows = [json.loads(line) for line in lines]
    else:
        print(f"{SESSIONS} is not here: sessions are drawn", file=sys.stderr)
        rows = [
            {"session": number, "block_ids": [(number, block) for block in range(4 * turn)], "output_tokens": 100}
            for number in range(25)
            for turn in range(1, 20)
        ]
    by_session: dict[int, list[Turn]] = defaultdict(list)
    per_block = args.tokens_per_block
    for row in rows:
        prompt = [1]
        for block in row["block_ids"]:
            dice = random.Random(str(block))
            prompt += [dice.randrange(3, 1000) for _ in range(per_block)]
        by_session[row["session"]].append(Turn(prompt, max(1, row["output_tokens"] * per_block // 64)))
    return list(by_session.values())[: args.sessions]


def replay(args: argparse.Namespace) -> dict[str, float]:
    """Replays all sessions in a closed loop: each sends its next request when it has the answer to its last one."""
    sessions = sessions_of(args)
    longest = max(len(turn.prompt) + turn.output for turns in sessions for turn in turns)
    size = args.tokens_per_block
    prompts = {tuple(turn.prompt) for turns in sessions for turn in turns}
    beginnings = {hash(prompt[:end]) for prompt in prompts for end in range(size, len(prompt) + 1, size)}
    num_tokens = len(beginnings) * size
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder)
        page_bytes, page_size = _page(args, probe)
        needed = 2 * num_tokens // page_size * page_bytes
        is_large = args.contender == CONTENDERS[-1]
        share = needed if is_large else int(needed / 2 / args.over_commit)
        options: dict[str, Any] = {"kv_cache_memory": max(share, (longest // page_size + 8) * page_bytes)}
        if "host" in args.contender:
            options |= {"kv_host_memory": needed if args.contender == "host" else needed // 4}
        if "disk" in args.contender:
            options |= {"kv_disk_path": f"{folder}/kv", "kv_disk_size": 4 * needed + (64 << 20)}
        engine = open_engine(args, probe, max_num_seqs=16, **options)
        serve(engine, [5] * 200)
        return _run(engine, sessions)


def _page(args: argparse.Namespace, folder: Path) -> tuple[int, int]:
    """Returns the bytes and the tokens of a page, from an engine with a small cache."""
    engine: Any = open_engine(args, folder, kv_cache_memory=1 << 28)
    spec = engine._runner.pool.spec
    found = spec.page_bytes, spec.page_size
    del engine
    return found


def _run(engine: Engine, sessions: list[list[Turn]]) -> dict[str, float]:
    waiting, began_at, firsts = [list(reversed(turns)) for turns in sessions], {}, []
    num_prompt = num_cached = num_turns = 0

    def send(number: int) -> None:
        turn = waiting[number].pop()
        name = f"{number}.{len(waiting[number])}"
        params = SamplingParams(temperature=0.0, max_tokens=turn.output, ignore_eos=True)
        began_at[name] = time.perf_counter()
        engine.add(Request(request_id=name, prompt_token_ids=turn.prompt, sampling=params))

    began = time.perf_counter()
    for number in range(len(sessions)):
        send(number)
    prompts = {f"{number}.{len(turns) - 1 - at}": len(turn.prompt)
               for number, turns in enumerate(sessions) for at, turn in enumerate(turns)}  # fmt: skip
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            if output.token_ids and (at := began_at.pop(output.request_id, None)) is not None:
                firsts.append(time.perf_counter() - at)
            if output.finish_reason is not None:
                num_turns += 1
                num_prompt += prompts[output.request_id]
                num_cached += output.num_cached_tokens
                number = int(output.request_id.partition(".")[0])
                if waiting[number]:
                    send(number)
    seconds = time.perf_counter() - began
    tiers = engine.stats().kv_tiers.tiers
    firsts.sort()
    return {
        "requests/s": num_turns / seconds,
        "hit rate": num_cached / num_prompt,
        "host tokens": tiers["host"].hit_tokens if "host" in tiers else 0,
        "disk tokens": tiers["disk"].hit_tokens if "disk" in tiers else 0,
        "declined tokens": sum(tier.declined_tokens for tier in tiers.values()),
        "mismatches": sum(tier.mismatches for tier in tiers.values()),
        "TTFT p50 ms": 1000 * median(firsts),
        "TTFT p90 ms": 1000 * firsts[len(firsts) * 9 // 10],
        "seconds": seconds,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all contenders one after another."""
    found: dict[str, dict[str, float]] = {}
    for name in CONTENDERS:
        command = [sys.executable, __file__, *sys.argv[1:], "--contender", name]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = json.loads(ended.stdout.splitlines()[-1])
        save(args.out, {"sessions": found})
    rows = [(figure, *(one[figure] for one in found.values())) for figure in found[CONTENDERS[0]]]
    print_table(("", *found), rows)
    return {"sessions": found}


if __name__ == "__main__":
    main()
