"""Measures what the prefix cache's tiers cost and save, one prompt or one load at a time.

    python benchmarks/kv_tiers.py --model qwen2.5-7b --part hit --lengths 512,2048,4096,8192 --out FILE
    python benchmarks/kv_tiers.py --model qwen2.5-7b --part copies --out FILE
    python benchmarks/kv_tiers.py --model qwen2.5-7b --part unshared --host-path /dev/shm/kv --out FILE

- hit: the time to the first token of a prompt that is computed, or of which so many tokens are on the device, in main
  memory or on the disk; 16 more are computed.
- layerwise: the time to the first token of a prompt whose tokens are in main memory, if the pass of the 16 that are
  computed follows the load layer by layer, and if it comes after the load; in turns. On a CPU, whose copies take time
  of its cores. With `--link-bytes-per-s` each copy also sleeps as long as a link of that speed would take.
- copies: bytes per second of whole pages between the device and main memory, digests included.
- unshared: tokens per second of prompts that hit nothing, with a tier that copies behind and without, in turns, on one
  engine whose cache is so small that every prompt evicts others.
- index: microseconds of the engine's thread for the record of a pool's pages, its own and one that two engines share.

With `--host-path` main memory is a pool that engines share. `kv_tier_traces.py` replays recorded loads.
"""

import argparse
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common.models import CONFIGS, model_folder, vocabulary
from common.report import integers, log_line, make_parser, print_table, save, words

from mini_infer_contract.blocks import KEY_BYTES
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier_index import HostIndex
from mini_infer_engine.core.kv_tiers.tier_memory import PageMove
from mini_infer_engine.core.kv_tiers.tiers import NO_TIERS
from mini_infer_engine.core.prefix_cache import Block
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core_process.build import BuiltEngine, build_engine
from mini_infer_engine.kv_host.open_pool import open_pool, record_bytes
from mini_infer_engine.kv_host.pool_file import PoolLayout
from mini_infer_engine.kv_host.shared_index import SharedHostIndex
from mini_infer_engine.runtime.memory.layerwise_load import CopiedLayers

_COMPUTED = 16
"""Tokens of a prompt behind those that hit: a page has a multiple of them."""
_SMOKE = {
    "part": ["hit", "layerwise", "copies", "unshared"],
    "model": "demo",
    "lengths": [64, 256],
    "concurrencies": [1, 2],
    "host_bytes": 200 << 20,
    "cache_bytes": 50_000_000,
    "prompt": 48,
    "output": 4,
    "rounds": 1,
    "copied_bytes": 4 << 20,
}


def main() -> None:
    """Measures, prints tables, and writes a JSON file."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="a shape with random weights, or demo")
    parser.add_argument("--part", type=words, default=["hit", "copies", "unshared"], help="such as hit,copies")
    parser.add_argument("--lengths", type=integers, default=[512, 2048, 4096, 8192], help="tokens of prompts, of `hit`")
    parser.add_argument("--concurrencies", type=integers, default=[1, 8, 64], help="requests at a time, of `unshared`")
    parser.add_argument("--host-path", help="a folder in memory for a pool that engines share")
    parser.add_argument("--disk-path", help="a folder for the disk's tier (default: a temporary one)")
    parser.add_argument("--tier-dtype", default="auto", help="int4: four bits an element in lower tiers")
    parser.add_argument("--no-disk", action="store_true", help="hits of `hit` come from main memory alone")
    parser.add_argument("--link-bytes-per-s", type=float, default=0.0, help="a modelled link, of `layerwise`")
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length; pairs of each concurrency")
    parser.add_argument("--host-bytes", type=int, default=16 << 30, help="main memory, and the disk")
    parser.add_argument("--cache-bytes", type=int, default=8_000_000_000, help="the device's KV cache")
    parser.set_defaults(prompt=1024, output=64, copied_bytes=512 << 20)
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(_SMOKE)
    result: dict[str, Any] = {"model": args.model, "tier dtype": args.tier_dtype}
    if "index" in args.part:
        result["index"] = index_times()
        args.part.remove("index")
        save(args.out, result)
    if not args.part:
        return
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"kv_host_memory": args.host_bytes, "kv_cache_memory": args.cache_bytes, "max_num_seqs": 64}
        disk = {"kv_disk_path": args.disk_path or f"{folder}/kv", "kv_disk_size": args.host_bytes}
        disk = disk if "hit" in args.part and not args.no_disk else {}
        sizes |= {"kv_host_path": args.host_path} if args.host_path else {}
        sizes |= {"kv_tier_dtype": args.tier_dtype}
        engine = open_engine(args.model, Path(folder), **sizes, **disk)
        largest = 1000 if args.model == "demo" else vocabulary(str(model_folder(args.model, Path(folder))))
        for name in args.part:
            part = {"hit": hits, "layerwise": layerwise, "copies": copies, "unshared": unshared}[name]
            result[name] = part(args, engine, largest)
            save(args.out, result)


def open_engine(model: str, folder: Path, **options: Any) -> Engine:
    """Starts an engine in this process."""
    is_named = model in CONFIGS
    settings = EngineSettings(
        model=str(model_folder(model, folder)) if is_named else model,
        load_format="dummy" if is_named else "auto",
        skip_tokenizer_init=True,
        **options,
    )
    built = build_engine(settings, record_events=False)
    assert isinstance(built, BuiltEngine)
    while built.warm_up():  # passes have all their graphs
        pass
    return built.engine


def add(engine: Engine, name: str, prompt: list[int], output: int) -> None:
    """Adds a greedy request."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=params))


def serve(engine: Engine, prompt: list[int], output: int = 1) -> float:
    """Serves a prompt alone. Returns the seconds to its first token."""
    began, first_s = time.perf_counter(), 0.0
    add(engine, f"{began}", prompt, output)
    while engine.has_work:
        for made in engine.step():
            assert made.finish_reason != "error", made.error
            first_s = first_s or time.perf_counter() - began
    return first_s


def write_behind(engine: Engine) -> None:
    """Copies to lower tiers all that is to be copied."""
    while engine.write_behind():
        engine._tiers.wait(1.0)


def index_times(num_pages: int = 10_000, at_once: int = 8, prefix: int = 32) -> dict[str, dict[str, float]]:
    """Times what a step, a batch that is written behind, and a hit cost beside the copies. Pages are of one block."""

    def record(number: int) -> PageRecord:
        block = Block(0, number.to_bytes(KEY_BYTES, "big"), None, bytes(64), "", [])
        return PageRecord((block,), number)

    def store(index: HostBlocks, first: int) -> None:
        pages = index.allocate(at_once)
        index.add_all([(page, record(first + place)) for place, page in enumerate(pages)])
        index.release_all(pages)

    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        layout = PoolLayout(num_pages, record_bytes(16), 4096, "0" * 64)
        files = [open_pool(folder, layout.file_bytes, 4096, 16, "0" * 64) for _ in range(2)]
        shared, other = (SharedHostIndex(file, record_events=True) for file in files)
        own = HostIndex(num_pages, 16, record_events=True)
        for name, index, writer in (("own", own, own), ("shared", shared, other)):
            times: dict[str, list[float]] = defaultdict(list)
            for number in range(0, 2 * num_pages, at_once):
                for what, call in (
                    ("a step in which nothing changed", index.sync),
                    (f"{at_once} pages stored", partial(store, writer, number)),
                    ("a step after they were stored by another engine", index.sync),
                ):
                    began = time.perf_counter()
                    call()
                    times[what].append(time.perf_counter() - began)
                keys = [record(max(0, number - place)).key for place in range(prefix)]
                began = time.perf_counter()
                index.release_all([page for page in index.acquire(keys) if page is not None])
                times[f"a hit of {prefix} pages"].append(time.perf_counter() - began)
                index.events.take(), writer.events.take()
            found[name] = {what: 1e6 * median(values) for what, values in times.items()}
    print_table(("median us", *found), [(what, *(one[what] for one in found.values())) for what in found["own"]])
    return found


def hits(args: argparse.Namespace, engine: Engine, largest: int) -> dict[str, Any]:
    """Measures the time to the first token of prompts by where their blocks are."""
    tiers: Any = engine._tiers
    dice, rows, found, came = random.Random(1), [], {}, dict[int, dict[str, int]]()
    for length in args.lengths:
        times: dict[str, list[float]] = defaultdict(list)
        before = {name: tier.hit_tokens for name, tier in engine.stats().kv_tiers.tiers.items()}
        serve(
            engine, [dice.randrange(3, largest) for _ in range(length + _COMPUTED)]
        )  # compiles what this length needs
        for _ in range(args.rounds):
            prompt = [dice.randrange(3, largest) for _ in range(length + _COMPUTED)]
            times["computed"].append(serve(engine, prompt))
            times["device"].append(serve(engine, prompt))
            write_behind(engine)
            for medium in engine.stats().kv_tiers.tiers:
                engine.scheduler.kv_cache.reset_prefix_cache()
                if medium == "disk":
                    tiers._host.clear()
                tiers._search.compute_tokens_per_s = engine._rate.tokens_per_s = (
                    1.0  # it is to load, whatever that costs
                )
                times[medium].append(serve(engine, prompt))
        row = {name: 1000 * median(values) for name, values in times.items()}
        rows.append((length, *row.values(), row["host"] - row["device"]))
        counts = engine.stats().kv_tiers.tiers
        came[length] = {name: tier.hit_tokens - before[name] for name, tier in counts.items()}
        found[length] = row | {"all": times, "loaded tokens": came[length]}
        log_line(f"{length} tokens")
    print_table(("tokens", *(f"{medium} ms" for medium in times), "host - device"), rows)
    stats = engine.stats().kv_tiers.tiers
    speeds = {f"{name}, load": counts.loaded_bytes / counts.load_s for name, counts in stats.items() if counts.load_s}
    speeds |= {
        f"{name}, store": counts.stored_bytes / counts.store_s for name, counts in stats.items() if counts.store_s
    }
    print_table(("copies", "GB/s"), [(name, speed / 1e9) for name, speed in speeds.items()])
    print({name: (counts.mismatches, counts.errors) for name, counts in stats.items()}, "loaded tokens:", came)
    return {"times": found, "bytes per s": speeds}


def layerwise(args: argparse.Namespace, engine: Engine, largest: int) -> dict[str, Any]:
    """Measures the time to the first token of prompts in main memory, loaded with their pass and before it."""
    host: Any = engine._runner.host_memory
    assert host.layerwise is not None, "this engine loads whole pages"
    host.least_load_s = 0.0
    num_layers, dice, rows, found = host.num_layers, random.Random(3), [], {}
    if args.link_bytes_per_s:
        add_link(host, args.link_bytes_per_s)
    ways = {"device": None, "before the pass": 0, "with the pass": num_layers}
    for length in args.lengths:
        prompt = [dice.randrange(3, largest) for _ in range(length + _COMPUTED)]
        times: dict[str, list[float]] = defaultdict(list)
        serve(engine, prompt)
        write_behind(engine)
        for number in range(args.rounds + 1):
            for name in list(ways) if number % 2 else list(reversed(ways)):
                if (layers := ways[name]) is None:
                    serve(engine, prompt)
                else:
                    engine.scheduler.kv_cache.reset_prefix_cache()
                    host.num_layers = layers
                engine._tiers._search.compute_tokens_per_s = engine._rate.tokens_per_s = 1.0  # type: ignore[union-attr]
                times[name].append(serve(engine, prompt))
        medians = {name: 1000 * median(values[1:]) for name, values in times.items()}
        pairs = zip(times["before the pass"][1:], times["with the pass"][1:], strict=True)
        ratios = sorted(before / beside for before, beside in pairs)
        rows.append((length, *medians.values(), median(ratios), sum(ratio > 1 for ratio in ratios) / len(ratios)))
        found[length] = medians | {"all": times}
        log_line(f"{length} tokens")
    print_table(("tokens", *(f"{name} ms" for name in medians), "ratio of pairs", "faster in"), rows)
    tier = engine.stats().kv_tiers.tiers["host"]
    print(f"{tier.hit_tokens} tokens loaded, {tier.mismatches} mismatches, {tier.errors} errors")
    return found


def add_link(host: Any, bytes_per_s: float) -> None:
    """Has loads sleep as long as their bytes would take on a link, whole pages before the first, others by layer."""
    load, load_page, load_layerwise, copied = host.load, host._load, host.load_layerwise, CopiedLayers.copied
    seconds = [0.0]

    def begin(load: Callable[..., Any], ticket: int, moves: Sequence[PageMove], *states: Any) -> Any:
        seconds[0] = len(moves) * host.page_bytes / bytes_per_s
        return load(ticket, moves, *states)

    def load_slowly(move: PageMove) -> int:
        time.sleep(seconds[0])
        seconds[0] = 0.0
        return int(load_page(move))

    def copied_slowly(layers: CopiedLayers, count: int) -> None:
        if count <= host.num_layers:
            time.sleep(seconds[0] / host.num_layers)
        copied(layers, count)

    host._load, host.load, host.load_layerwise = load_slowly, partial(begin, load), partial(begin, load_layerwise)
    CopiedLayers.copied = copied_slowly  # type: ignore[method-assign]


def copies(args: argparse.Namespace, engine: Engine, largest: int) -> dict[str, float]:
    """Measures the speed of copies of many pages at a time, by the clock and by the device's own events."""
    host: Any = engine._runner.host_memory
    count = min(max(1, args.copied_bytes // host.page_bytes), host.num_pages, engine._runner.num_pages)
    moves = [PageMove(page, page) for page in range(count)]
    found: dict[str, float] = {}
    for name in ("store", "load") * (args.rounds + 1):
        began = time.perf_counter()
        getattr(host, name)(0, moves)
        while not (ended := host.take()):
            host.wait(1.0)
        by_clock = count * host.page_bytes / (time.perf_counter() - began)
        by_events = count * host.page_bytes / ended[0].seconds
        found[name] = max(found.get(name, 0.0), by_events)
        found[f"{name}, by the clock"] = max(found.get(f"{name}, by the clock", 0.0), by_clock)
    engine.reset_prefix_cache()
    print_table((f"{count} pages of {host.page_bytes:,} bytes", "GB/s"), [(k, v / 1e9) for k, v in found.items()])
    return found


def unshared(args: argparse.Namespace, engine: Engine, largest: int) -> dict[str, Any]:
    """Measures throughput without any hit, with tiers and without, in turns."""
    dice, tiers, rows, found = random.Random(2), engine._tiers, [], {}

    def rate(concurrency: int) -> float:
        count = max(4, 2 * concurrency)
        prompts = [[dice.randrange(3, largest) for _ in range(args.prompt)] for _ in range(count)]
        began, waiting = time.perf_counter(), list(enumerate(prompts))
        for number, prompt in waiting[:concurrency]:
            add(engine, f"{began} {number}", prompt, args.output)
        del waiting[:concurrency]
        while engine.has_work:
            for made in engine.step():
                if made.finish_reason is not None and waiting:
                    number, prompt = waiting.pop(0)
                    add(engine, f"{began} {number}", prompt, args.output)
        return count * (args.prompt + args.output) / (time.perf_counter() - began)

    while engine.scheduler.kv_cache.cache.pool.num_blank:  # type: ignore[union-attr]  # it has pages
        rate(args.concurrencies[-1])
        if args.smoke:
            break
    for concurrency in args.concurrencies:
        with_, without = list[float](), list[float]()
        for number in range(2 * args.rounds + 2):
            # Pairs turn around, so that a drift of the clock favours neither.
            has_tiers = number % 4 in (1, 2)
            engine._tiers = engine.scheduler.tiers = tiers if has_tiers else NO_TIERS
            (with_ if has_tiers else without).append(rate(concurrency))
            while tiers.are_copying:
                tiers.take(0.0, time.monotonic())
        ratios = sorted(one / other for one, other in zip(with_[1:], without[1:], strict=True))
        rows.append((concurrency, median(without[1:]), median(with_[1:]), median(ratios), ratios[0], ratios[-1]))
        found[concurrency] = {"with": with_[1:], "without": without[1:], "ratio": median(ratios)}
        log_line(f"{concurrency} requests at a time")
    engine._tiers = engine.scheduler.tiers = tiers
    print_table(("requests at a time", "without tok/s", "with tok/s", "ratio", "least", "most"), rows)
    print({name: counts.stored_bytes for name, counts in engine.stats().kv_tiers.tiers.items()}, "bytes stored")
    return found


if __name__ == "__main__":
    main()
