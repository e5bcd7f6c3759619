"""Measures what tiers below the prefix cache cost the engine's thread, and which passes they delay. Without a GPU.

    python benchmarks/kv_tier_steps.py --out FILE
    python benchmarks/kv_tier_steps.py --loads agents --over-commit 2 --calls --profile 25

The recorded loads of kv_tier_traces.py are replayed by the real engine on a modelled device, whose clock is virtual. A
pass takes --pass-ms, and its prompt tokens at --prompt-tokens-per-s; a copy between device and main memory 0.2 ms and
its tokens at --copy-tokens-per-s, beside passes, those of each direction one after another. The host takes --host-ms of
each step. Figures of the model are the same in each run. Processor time is this machine's: microseconds in a step of
the thread that steps, the modelled device included, which costs the same with tiers and without. Events are recorded
and taken in each step, as by a server.

Running, waiting and loading are seconds summed over sequences. Main memory has room for all distinct tokens and a
fourth more. Traces are read from ../shared/data; without them conversations are drawn.
"""

import argparse
import cProfile
import gc
import heapq
import pstats
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from common.report import make_parser, percentile, print_table, save
from common.tiered_engines import MAX_NUM_SEQS, Cache
from kv_tier_traces import Load, add_load_options, prompts_of, read_load

from mini_infer_engine.config.model.kv_groups import UNIFORM
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core import engine as engine_module
from mini_infer_engine.core.batch import NO_SWAP, Batch
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers.tier_memory import Moved, PageMove, StateMove
from mini_infer_engine.core.request import Output, Request, SamplingParams
from mini_infer_engine.core.result import PassResult

PAGE_TOKENS = 128
COPY_LATENCY_S = 0.0002
CALLS = ("match", "load", "load_layerwise", "read_ahead", "used", "take", "write_behind", "take_events")
"""Calls of the tiers that are timed, of which none calls another."""


class Device:
    """A device that computes passes one after another, with the clock of everything. It stands in for `time`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.now_s, self.free_s, self.busy_s = 1000.0, 0.0, 0.0
        self.monotonic = self.time = lambda: self.now_s
        self._pass_s, self._token_s = args.pass_ms / 1000, 1 / args.prompt_tokens_per_s
        self.host_s = args.host_ms / 1000
        self.rows: list[int] = []
        """The rows of each pass."""

    def compute(self, batch: Batch) -> float:
        """Returns the time at which a pass ends that is launched now."""
        tokens = sum(row.count for row in batch.rows[batch.num_decodes :])
        seconds = self._pass_s + tokens * self._token_s
        self.free_s = max(self.now_s, self.free_s) + seconds
        self.busy_s += seconds
        self.rows.append(len(batch.rows))
        return self.free_s

    def wait_until(self, due_s: float) -> None:
        """Goes to this time."""
        self.now_s = max(self.now_s, due_s)


class Host:
    """Main memory whose copies end when the clock says so."""

    identity, page_bytes, pages_per_state = b"modelled", PAGE_TOKENS, 0
    latency_s, layerwise = COPY_LATENCY_S, None

    def __init__(self, num_pages: int, device: Device, tokens_per_s: float) -> None:
        self.num_pages, self._device, self.bytes_per_s = num_pages, device, tokens_per_s
        self._free_s = {"store": 0.0, "load": 0.0}
        self._jobs: list[tuple[float, int, float, int]] = []
        self.copies: dict[str, list[int]] = {"store": [], "load": []}
        """The pages of each copy, by direction."""

    def _copy(self, direction: str, ticket: int, count: int) -> None:
        now_s = self._device.now_s
        end_s = max(now_s, self._free_s[direction]) + COPY_LATENCY_S + count * PAGE_TOKENS / self.bytes_per_s
        self._free_s[direction] = end_s
        self.copies[direction].append(count)
        heapq.heappush(self._jobs, (end_s, ticket, end_s - now_s, count))

    def store(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Implements `HostMemory`. There are no states."""
        del states
        self._copy("store", ticket, len(moves))

    def load(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Implements `HostMemory`. There are no states."""
        del states
        self._copy("load", ticket, len(moves))

    def take(self) -> list[Moved]:
        """Implements `HostMemory`. There are no bytes: all digests are equal."""
        ended = []
        while self._jobs and self._jobs[0][0] <= self._device.now_s:
            _, ticket, seconds, count = heapq.heappop(self._jobs)
            ended.append(Moved(ticket, seconds, [0] * count))
        return ended

    def wait(self, timeout_s: float) -> None:
        """Implements `HostMemory`."""
        self._device.wait_until(min(self._jobs[0][0], self._device.now_s + timeout_s))

    def page_memory(self, page: int) -> memoryview:
        """Is never called: there is no disk."""
        raise AssertionError(page)


class Runner:
    """A runner without a model, all of whose tokens are different: answers are no prefix of anything."""

    page_size, max_speculative_rows = PAGE_TOKENS, 0
    kv_cache, swap_space, eviction_obstacle = UNIFORM, NO_SWAP, None

    def __init__(self, num_pages: int, host: Host | None, device: Device) -> None:
        self.num_pages, self.host_memory, self._device = num_pages, host, device
        self._serial = 1000

    def refuses(self, request: Request) -> None:
        """Refuses nothing."""

    def launch(self, batch: Batch) -> tuple[list[list[int]], float]:
        """Returns the tokens of the rows that sample, and the end of the pass."""
        tokens = list[list[int]]()
        for row in batch.rows:
            self._serial += 1
            tokens.append([self._serial % (1 << 20)] if row.sampling is not None else [])
        return tokens, self._device.compute(batch)

    def collect(self, handle: tuple[list[list[int]], float]) -> PassResult:
        """Returns the tokens of a launched pass at its end."""
        tokens, end_s = handle
        self._device.wait_until(end_s)
        return PassResult(list(tokens))


class Spent:
    """The processor time of calls of an object, by name. Replaces them by calls that are timed."""

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self.seconds: Counter[str] = Counter()
        for name in names:
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            began_s = time.thread_time()
            found = call(*args, **keywords)
            self.seconds[name] += time.thread_time() - began_s
            return found

        return timed


class Replay:
    """A load in a closed loop on an engine of its own."""

    def __init__(self, args: argparse.Namespace, load: Load, prompts: list[list[list[int]]], cache: Cache) -> None:
        """Creates an engine with so many tokens on the device and in main memory."""
        self._load, self._prompts = load, prompts
        self._device = device = Device(args)
        num_pages, num_host_pages = (-(-tokens // PAGE_TOKENS) for tokens in (cache.device or 0, cache.host))
        self._host = Host(num_host_pages, device, args.copy_tokens_per_s) if num_host_pages else None
        engine_module.time = device  # type: ignore[attr-defined]  # it stands in for the module
        settings = EngineSettings(model="modelled", max_num_seqs=MAX_NUM_SEQS)
        runner: Any = Runner(num_pages, self._host, device)
        self._engine = Engine(settings, runner, (), load.cache_tokens(load.distinct_tokens), "")
        self._calls = Spent(self._engine._tiers, CALLS if args.calls and self._host else ())
        self._waiting = [list(range(len(turns)))[::-1] for turns in load.conversations]
        self._idle = list(range(len(prompts)))
        self._sent_s: dict[str, float] = {}
        self._firsts: list[float] = []
        self._counts: Counter[str] = Counter()
        """Requests, and tokens of their prompts."""
        self._sequence_s: Counter[str] = Counter()
        """Seconds of sequences by what they do."""

    def run(self) -> dict[str, float]:
        """Returns the figures of the replay."""
        engine, device, start_s, spent_s, num_steps = self._engine, self._device, self._device.now_s, 0.0, 0
        for _ in range(min(self._load.concurrency, len(self._idle))):
            self._send()
        while engine.has_work:
            before_s = device.now_s
            device.wait_until(before_s + device.host_s)
            began_s = time.thread_time()
            outputs = engine.step()
            engine.take_events()
            spent_s += time.thread_time() - began_s
            num_steps += 1
            scheduler = engine.scheduler
            by_state = {"running": scheduler.running, "waiting": scheduler.waiting, "loading": scheduler.receiving}
            for name, sequences in by_state.items():
                self._sequence_s[f"{name} s"] += len(sequences) * (device.now_s - before_s)
            for output in outputs:
                self._take(output)
        spent = {"step us": spent_s} | {f"{name} us": value for name, value in self._calls.seconds.items()}
        return self._modelled(device.now_s - start_s) | {
            "steps": num_steps,
            **{name: 1e6 * value / num_steps for name, value in spent.items()},
        }

    def _send(self) -> None:
        place = self._idle.pop(0)
        turn = self._waiting[place].pop()
        name, output = f"{place}.{turn}", self._load.conversations[place][turn].output
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self._sent_s[name] = self._device.now_s
        prompt = self._prompts[place][turn]
        self._engine.add(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling))

    def _take(self, output: Output) -> None:
        assert output.finish_reason != "error", output.error
        place, turn = map(int, output.request_id.split("."))
        if output.token_ids and (at_s := self._sent_s.pop(output.request_id, None)) is not None:
            self._firsts.append(self._device.now_s - at_s)
            self._counts["cached"] += output.num_cached_tokens
        if output.finish_reason is None:
            return
        self._counts["requests"] += 1
        self._counts["prompt"] += len(self._prompts[place][turn])
        if self._waiting[place]:
            self._idle.append(place)  # it waits behind those that have not begun, as in kv_tier_traces.py
        if self._idle:
            self._send()

    def _modelled(self, seconds: float) -> dict[str, float]:
        stats, counts, rows = self._engine.stats(), self._counts, self._device.rows
        from_host = sum(tier.hit_tokens for tier in stats.kv_tiers.tiers.values())
        copies = {"store": list[int](), "load": list[int]()} if self._host is None else self._host.copies
        return {
            "requests/s": counts["requests"] / seconds,
            "hit": counts["cached"] / counts["prompt"],
            "from host": from_host / counts["prompt"],
            "TTFT p50 ms": 1000 * percentile(self._firsts, 0.5),
            "TTFT p90 ms": 1000 * percentile(self._firsts, 0.9),
            "passes": len(rows),
            "rows": sum(rows) / len(rows),
            "idle s": seconds - self._device.busy_s,
            **self._sequence_s,
            **{f"{name}s": len(pages) for name, pages in copies.items()},
            **{f"pages of {name}s": sum(pages) for name, pages in copies.items()},
        }


def caches_of(load: Load, over_commits: Sequence[int]) -> list[Cache]:
    """Returns the caches that are compared, one that suffices first."""
    caches = [Cache("infinite", 4 * load.distinct_tokens)]
    for times in over_commits:
        tokens = load.cache_tokens(times)
        caches += [Cache(f"{times}x, GPU", tokens), Cache(f"{times}x, + host", tokens, load.distinct_tokens * 5 // 4)]
    return caches


def profile(replay: Replay, count: int) -> None:
    """Prints the functions that take most of a replay."""
    profiler = cProfile.Profile()
    profiler.runcall(replay.run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(count)


def main() -> int:
    """Replays the loads with all caches, prints tables, and writes a JSON file."""
    parser = make_parser(__doc__)
    add_load_options(parser, conversations=[12, 6])
    parser.add_argument("--rounds", type=int, default=5, help="of which the least processor time counts")
    parser.add_argument("--pass-ms", type=float, default=5.0)
    parser.add_argument("--host-ms", type=float, default=0.5)
    parser.add_argument("--prompt-tokens-per-s", type=float, default=40_000.0)
    parser.add_argument("--copy-tokens-per-s", type=float, default=512_000.0, help="96 KB a token at 50 GB/s")
    parser.add_argument("--calls", action="store_true", help="time calls of the tiers, which adds to the step")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="of the last cache, N functions")
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(conversations=[3, 3], tokens_per_block=16, over_commit=[2], rounds=1, concurrency=2)
    result: dict[str, Any] = {"loads": {}}
    for name, count in zip(args.loads, args.conversations, strict=False):
        load = read_load(args, name, count)
        prompts, caches = prompts_of(load, 0), caches_of(load, args.over_commit)
        runs: dict[str, dict[str, float]] = {}
        for _ in range(args.rounds):
            for cache in caches:
                gc.collect()
                gc.freeze()  # as the core process does
                found = Replay(args, load, prompts, cache).run()
                gc.unfreeze()
                least = runs.setdefault(cache.name, found)
                least.update({key: min(value, least[key]) for key, value in found.items() if key.endswith(" us")})
        for row in runs.values():
            row["of infinite"] = row["requests/s"] / runs["infinite"]["requests/s"]
        result["loads"][name] = runs
        save(args.out, result)
        print(name)
        figures = list(dict.fromkeys(figure for row in runs.values() for figure in row))
        print_table(["", *figures], [[cache, *map(row.get, figures)] for cache, row in runs.items()])
        if args.profile:
            profile(Replay(args, load, prompts, caches[-1]), args.profile)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
