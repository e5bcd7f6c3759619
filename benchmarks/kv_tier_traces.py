"""Recorded loads on a KV cache that is too small: the GPU alone, with main memory, with a disk, and one that suffices.

    python benchmarks/kv_tier_traces.py --model qwen2.5-7b --load mooncake --over-commit 1,2,4 --out FILE
    python benchmarks/kv_tier_traces.py --model qwen2.5-7b --load agents --vllm --out FILE

Loads: `mooncake`, conversations of three turns and more of the Mooncake trace (FAST'25), and `agents`, recorded
sessions of agents with tools. Both in a closed loop: a conversation sends its next request when it has the answer to
its last one, and so many of them run at a time. A block of the record has `--tokens-per-block` tokens here, random ones
of its own; prompts and answers are shorter in proportion. Over-commit is all distinct tokens over those that fit on the
GPU.

All of our contenders run on one engine, of whose pages, and pages of main memory, a part is taken away, and whose tiers
are switched off: they differ in nothing else. With `--vllm` the same load is served by vLLM, its cache as large, with
CPU offloading (kv_offloading_size) and without; it is a process of its own for each cache size. Traces are read from
../shared/data, or from the file that KV_TIER_LOAD names: what `--extract` has written.
"""

import argparse
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import engines
from common.models import kv_bytes_per_token, model_folder
from common.report import integers, log_line, make_parser, percentile, print_table, save

FOLDER = Path(__file__).parents[2] / "shared" / "data"
TRACES = {"mooncake": "mooncake_conversation_trace.jsonl.xz", "agents": "agent_sessions.jsonl.xz"}
BLOCK_TOKENS = {"mooncake": 512, "agents": 64}
"""Tokens of a block of the record."""
TINY_BLOCK_TOKENS = {"mooncake": 128, "agents": 32}
CONTENDERS = ("GPU", "+ host", "+ host, disk")
_MOST_BLOCKS = 128
"""Most tokens of a prompt of the Mooncake trace: longer ones would be most of the cache."""
_ANSWER_SHARE = {"mooncake": 4, "agents": 16}
"""Answers are shortened by so much more than prompts: prefill is what caches save."""


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    blocks: tuple[int, ...]
    output: int


def main() -> None:
    """Replays the load with all contenders, prints a table, and writes a JSON file."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load", choices=TRACES, default="agents")
    parser.add_argument("--conversations", type=int, default=25, help="of the record")
    parser.add_argument("--concurrency", type=int, default=12, help="conversations at a time")
    parser.add_argument("--tokens-per-block", type=int, help="of the prompts (default: 128 and 32)")
    parser.add_argument("--over-commit", type=integers, default=[1, 2, 4])
    parser.add_argument("--extract", type=Path, help="write this load to a file, and do nothing else")
    parser.add_argument("--vllm", action="store_true", help="vLLM instead, of PEER_SITE")
    parser.add_argument("--vllm-gib", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(model="demo", conversations=3, tokens_per_block=4, over_commit=[2])
    args.tokens_per_block = args.tokens_per_block or TINY_BLOCK_TOKENS[args.load]
    conversations = read_load(args)
    if args.extract is not None:
        rows = [[(turn.blocks, turn.output) for turn in turns] for turns in conversations]
        args.extract.write_text(json.dumps(rows, separators=(",", ":")))
    elif args.vllm_gib is not None:
        print(json.dumps(on_vllm(args, conversations)))
    else:
        found = beside_vllm(args, conversations) if args.vllm else replay_all(args, conversations)
        save(args.out, {"model": args.model, "load": args.load, "runs": found})
        names = list(next(iter(found.values())))
        print_table((args.load, *names), [(name, *row.values()) for name, row in found.items()])


def read_load(args: argparse.Namespace) -> list[list[Turn]]:
    """Returns the conversations, each in order. Blocks of equal text up to their ends are equal numbers."""
    if named := os.environ.get("KV_TIER_LOAD"):
        rows = json.loads(Path(named).read_text())
        return [[Turn(tuple(blocks), output) for blocks, output in turns] for turns in rows]
    path, shrink = (
        FOLDER / TRACES[args.load],
        BLOCK_TOKENS[args.load] / args.tokens_per_block * _ANSWER_SHARE[args.load],
    )
    by_name: dict[Any, list[Turn]] = defaultdict(list)
    if not path.is_file():
        print(f"{path} is not here: conversations are drawn", file=sys.stderr)
        turns = [[Turn(tuple(range(1000 * n, 1000 * n + 4 * t)), 8) for t in range(1, 9)] for n in range(60)]
        return turns[: args.conversations]
    with lzma.open(path, "rt") as lines:
        for row in map(json.loads, lines):
            blocks = row["block_ids"] if args.load == "agents" else row["hash_ids"][: row["input_length"] // 512]
            # The first block of all Mooncake prompts is the same: the second one names the conversation.
            name = row["session"] if args.load == "agents" else (blocks[1] if len(blocks) > 1 else None)
            output = row["output_tokens"] if args.load == "agents" else row["output_length"]
            if blocks and name is not None and (args.load == "agents" or len(blocks) <= _MOST_BLOCKS):
                by_name[name].append(Turn(tuple(blocks), max(1, int(output / shrink))))
    return [turns for turns in by_name.values() if len(turns) > 2][: args.conversations]


def prompt_of(turn: Turn, per_block: int) -> list[int]:
    """Returns the tokens of a request: those of its blocks, and a last one that is always computed."""
    tokens = [1]
    for block in turn.blocks:
        dice = random.Random(block)
        tokens += [dice.randrange(3, 1000) for _ in range(per_block)]
    return tokens


def replay_all(args: argparse.Namespace, conversations: Sequence[Sequence[Turn]]) -> dict[str, dict[str, float]]:
    """Replays the load with each cache."""
    from kv_tiers import open_engine  # a peer's process does not see our packages

    distinct = (
        len({block for turns in conversations for turn in turns for block in turn.blocks}) * args.tokens_per_block
    )
    longest = max(len(turn.blocks) * args.tokens_per_block + turn.output for turns in conversations for turn in turns)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        per_token = 1100 if args.model == "demo" else kv_bytes_per_token(str(model_folder(args.model, Path(folder))))
        needed = int(1.3 * distinct * per_token) + (64 << 20)
        disk = {"kv_disk_path": f"{folder}/kv", "kv_disk_size": 3 * needed}
        memory = {"kv_cache_memory": 2 * needed, "kv_host_memory": needed, "max_num_seqs": 16}
        engine: Any = open_engine(args.model, Path(folder), **memory, **disk)
        page_tokens, tiers = engine._runner.page_size, engine._tiers
        num_pages = -(-distinct // page_tokens)
        least = args.concurrency * 2 + longest // page_tokens + 8
        log_line(
            f"{sum(map(len, conversations))} requests, {distinct} distinct tokens, {num_pages} pages of {page_tokens}"
        )
        caches = [("infinite", engine._runner.num_pages, 0, 0)]
        for times in args.over_commit:
            pages = max(num_pages // times, least)
            for name, host in zip(CONTENDERS, (0, num_pages, num_pages // 4), strict=True):
                caches.append((f"{times}x, {name}", pages, host, host if "disk" in name else 0))
        replay(args, engine, conversations[:3])  # warms what the first run would pay for
        for name, pages, host, disk_pages in caches:
            engine.reset_prefix_cache()
            tiers._host_tier.is_on, tiers._disk_tier.is_on = bool(host), bool(disk_pages)
            pool, store = engine.scheduler.kv_cache.cache.pool, tiers._host.store
            taken = [pool.allocate() for _ in range(pool.num_free - pages)]
            taken_host = [store.allocate() for _ in range(store.num_free - host)] if host else []
            found[name] = replay(args, engine, conversations)
            while tiers.are_copying:
                tiers.wait(1.0)
                tiers.take(0.0, time.monotonic())
            pool.release_all(taken)
            store.release_all(taken_host)
            log_line(f"{name}: {found[name]['requests/s']:.2f} requests/s")
            save(args.out, {"model": args.model, "load": args.load, "runs": found})
    for row in found.values():
        row["of infinite"] = row["requests/s"] / found["infinite"]["requests/s"]
    return found


def replay(args: argparse.Namespace, engine: Any, conversations: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """Replays conversations in a closed loop on an engine. Returns its figures."""
    from kv_tiers import add

    waiting = [list(reversed(turns)) for turns in conversations]
    began_at: dict[str, float] = {}
    firsts, lengths = list[float](), dict[str, int]()
    num_prompt = num_cached = num_turns = 0
    before = engine.stats().kv_tiers.tiers

    def send(number: int) -> None:
        turn = waiting[number].pop()
        name = f"{number}.{len(waiting[number])}"
        prompt = prompt_of(turn, args.tokens_per_block)
        lengths[name], began_at[name] = len(prompt), time.perf_counter()
        add(engine, name, prompt, turn.output)

    idle = list(range(len(conversations)))
    began = time.perf_counter()
    for _ in range(min(args.concurrency, len(idle))):
        send(idle.pop(0))
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            if output.token_ids and (at := began_at.pop(output.request_id, None)) is not None:
                firsts.append(time.perf_counter() - at)
            if output.finish_reason is None:
                continue
            num_turns += 1
            num_prompt += lengths[output.request_id]
            num_cached += output.num_cached_tokens
            number = int(output.request_id.partition(".")[0])
            if waiting[number]:
                idle.append(number)  # it waits behind those that have not begun, so that more than fit are alive
            if idle:
                send(idle.pop(0))
    seconds = time.perf_counter() - began
    counts = {
        name: (tier.hit_tokens - before[name].hit_tokens, tier.declined_tokens - before[name].declined_tokens)
        for name, tier in engine.stats().kv_tiers.tiers.items()
    }
    return {
        "requests/s": num_turns / seconds,
        "seconds": seconds,
        "hit rate": num_cached / num_prompt,
        "from host": counts["host"][0] / num_prompt,
        "from disk": counts["disk"][0] / num_prompt,
        "declined": sum(declined for _, declined in counts.values()) / num_prompt,
        "TTFT p50 ms": 1000 * median(firsts),
        "TTFT p90 ms": 1000 * percentile(firsts, 0.9),
        "mismatches": sum(tier.mismatches for tier in engine.stats().kv_tiers.tiers.values()),
    }


def beside_vllm(args: argparse.Namespace, conversations: Sequence[Sequence[Turn]]) -> dict[str, dict[str, float]]:
    """Serves the load with vLLM, a process for each cache."""
    distinct = (
        len({block for turns in conversations for turn in turns for block in turn.blocks}) * args.tokens_per_block
    )
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        per_token = kv_bytes_per_token(str(model_folder(args.model, Path(folder))))
    for times in args.over_commit:
        for name, gib in (("+ host", 1.3 * distinct * per_token / (1 << 30)), ("GPU", 0.0)):
            environment = engines.peer_environment() | {"KV_TIER_GPU_BYTES": str(distinct * per_token // times)}
            command = [sys.executable, __file__, *sys.argv[1:], f"--vllm-gib={gib}"]
            ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if ended.returncode:
                print(ended.stderr[-3000:], file=sys.stderr)
                continue
            found[f"vLLM, {times}x, {name}"] = json.loads(ended.stdout.splitlines()[-1])
            log_line(f"vLLM, {times}x, {name}: {found[f'vLLM, {times}x, {name}']}")
            save(args.out, {"model": args.model, "load": args.load, "runs": found})
    return found


def on_vllm(args: argparse.Namespace, conversations: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """Serves the load in this process by vLLM's engine, step by step, as `replay` does."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import EngineArgs, LLMEngine, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        gpu_bytes = int(os.environ["KV_TIER_GPU_BYTES"])
        settings = engines.vllm_keywords(engines.share_of_gpu(gpu_bytes) | {"max_num_seqs": 16})
        offloading = {"kv_offloading_size": args.vllm_gib} if args.vllm_gib else {}
        engine = LLMEngine.from_engine_args(
            EngineArgs(model=str(model_folder(args.model, Path(folder))), **settings, **offloading)
        )
        waiting = [list(reversed(turns)) for turns in conversations[:3]]
        num_turns = num_prompt = num_cached = 0

        def send(number: int) -> None:
            turn = waiting[number].pop()
            params = SamplingParams(temperature=0.0, max_tokens=turn.output, ignore_eos=True, detokenize=False)
            prompt = {"prompt_token_ids": prompt_of(turn, args.tokens_per_block)}
            engine.add_request(f"{number}.{len(waiting[number])}", prompt, params)

        def run() -> None:
            nonlocal num_turns, num_prompt, num_cached
            idle = [number for number, turns in enumerate(waiting) if turns]
            for _ in range(min(args.concurrency, len(idle))):
                send(idle.pop(0))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if not output.finished:
                        continue
                    num_turns += 1
                    num_prompt += len(output.prompt_token_ids)
                    num_cached += output.num_cached_tokens or 0
                    number = int(output.request_id.partition(".")[0])
                    if waiting[number]:
                        idle.append(number)
                    if idle:
                        send(idle.pop(0))

        run()
        engine.reset_prefix_cache()
        waiting = [list(reversed(turns)) for turns in conversations]
        num_turns = num_prompt = num_cached = 0
        began = time.perf_counter()
        run()
        seconds = time.perf_counter() - began
    return {"requests/s": num_turns / seconds, "seconds": seconds, "hit rate": num_cached / num_prompt}


if __name__ == "__main__":
    main()
