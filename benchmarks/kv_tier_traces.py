"""Recorded loads on a KV cache that is too small: the GPU alone, with main memory, with a disk, and one that suffices.

    python benchmarks/kv_tier_traces.py --model qwen2.5-7b --loads mooncake,agents --over-commit 1,2,4 --peer --out FILE
    python benchmarks/kv_tier_traces.py --model qwen2.5-7b,qwen3-30b-a3b --peer host --out FILE

Loads: `mooncake`, conversations of three turns and more of the Mooncake trace (FAST'25), and `agents`, recorded
sessions of agents with tools. Both in a closed loop: a conversation sends its next request when it has the answer to
its last one, and so many of them run at a time. A block of the record has `--tokens-per-block` tokens here, random ones
of its own; prompts and answers are shorter in proportion. Over-commit is all distinct tokens over those that fit on the
GPU. Main memory has room for all of them and a quarter more; with a disk below it, for a little more than half of them.

All of our contenders run on one engine, of whose pages, and pages of main memory, a part is taken away, and whose tiers
are switched off: they differ in nothing else. With `--peer` vLLM serves the same loads in caches as large, with its CPU
offloading (kv_offloading_size) and without: an engine each, of whose blocks a part is taken away in the same way. All
engines start at the same time and are measured one after another. Traces are read from ../shared/data.

Of several models, all of whose peers start first, one after another is measured, and its engines end before the next of
ours starts. Each has a file of its own then, with its name.
"""

import argparse
import json
import lzma
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import engines
from common.budget import Budget
from common.isolation import Figures
from common.models import kv_bytes_per_token, model_folder
from common.quiet import measuring
from common.report import collect, integers, log_line, make_parser, medians_of, percentile, print_table, save, words
from common.targets import Target, print_verdicts
from common.tiered_engines import MAX_NUM_SEQS, VLLM, Cache, Ours, Server
from common.together import Start, Together
from routing.shared_data import find_shared

TRACES = {"mooncake": "mooncake_conversation_trace.jsonl.xz", "agents": "agent_sessions.jsonl.xz"}
TOKENS_PER_BLOCK = {"mooncake": 128, "agents": 32}
_MOST_OF_GPU = 0.97
"""The share of the GPU that all engines may take together, for their caches have the sizes that they are given."""
PEERS = {"host": "vLLM + host", "GPU": "vLLM"}
_RECORDED_TOKENS = {"mooncake": 512, "agents": 64}
"""Tokens of a block of the record."""
_MOST_BLOCKS = 128
"""Most blocks of a prompt of the Mooncake trace: longer ones would be most of the cache."""
_ANSWER_SHARE = {"mooncake": 4, "agents": 16}
"""Answers are shortened by so much more than prompts: prefill is what caches save."""
_LARGEST_PAGE = 128
"""Tokens; a sequence that runs has a part of two pages to itself."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    blocks: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Load:
    """Conversations, each in order. Blocks of equal text up to their ends are equal numbers."""

    name: str
    conversations: Sequence[Sequence[Turn]]
    tokens_per_block: int
    concurrency: int

    @property
    def distinct_tokens(self) -> int:
        """The tokens of a cache that never has to compute anything twice."""
        blocks = {block for turns in self.conversations for turn in turns for block in turn.blocks}
        return len(blocks) * self.tokens_per_block

    def cache_tokens(self, over_commit: int) -> int:
        """Returns the tokens that fit on the GPU: the longest request always does, and a little for each that runs."""
        longest = max(
            len(turn.blocks) * self.tokens_per_block + turn.output for turns in self.conversations for turn in turns
        )
        return max(self.distinct_tokens // over_commit, longest + (2 * self.concurrency + 8) * _LARGEST_PAGE)


def add_load_options(parser: argparse.ArgumentParser, *, conversations: list[int]) -> None:
    """Adds the options that choose recorded loads and what they are cut to."""
    parser.add_argument("--loads", type=words, default=list(TRACES), metavar="NAME,...", help="mooncake, agents")
    parser.add_argument("--conversations", type=integers, default=conversations, help="of each load's record")
    parser.add_argument("--concurrency", type=int, default=8, help="conversations at a time")
    parser.add_argument("--tokens-per-block", type=int, help="of the prompts (default: 128 and 32)")
    parser.add_argument("--over-commit", type=integers, default=[1, 2, 4])


def main() -> int:
    """Replays the loads with all contenders, prints tables, and writes a JSON file."""
    parser = make_parser(__doc__, starts_peers=True)
    parser.add_argument(
        "--model", type=words, metavar="NAME,...", help="shapes, with random weights (default: qwen2.5-7b)"
    )
    add_load_options(parser, conversations=[24, 12])
    parser.add_argument("--rounds", type=int, default=1, help="every other one begins with the last cache")
    parser.add_argument("--disk-path", help="a folder for the disk's tier (default: a temporary one)")
    parser.add_argument(
        "--peer",
        type=words,
        nargs="?",
        const=list(PEERS),
        default=[],
        metavar="NAME,...",
        help="vLLM, too, of PEER_SITE: with main memory (host), without (GPU), or both",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG of requests per second")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="measure nothing: show what --out has written")
    args = parser.parse_args()
    if args.figures is not None:
        show(json.loads(args.figures.read_text()), args.picture)
        return 0
    args.model = args.model or ["tiny" if args.smoke else "qwen2.5-7b"]
    if args.smoke:
        vars(args).update(conversations=[3, 3], tokens_per_block=4, over_commit=[2], concurrency=2)
    whole, starting = Budget(args.time_limit_s), Budget(min(args.time_limit_s, args.peer_start_s))
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        contests = [Contest(args, model, root, stack.enter_context(ExitStack())) for model in args.model]
        contests[0].start_ours()
        for contest in contests:
            contest.await_peers(starting.left_s)
        for contest in contests:
            contest.measure(whole)
    return int(any(contest.errors for contest in contests))


class Contest:
    """The engines of one model, and what was measured of them."""

    def __init__(self, args: argparse.Namespace, model: str, root: str, stack: ExitStack) -> None:
        """Starts its peers."""
        self._args, self._stack = args, stack
        self._loads = [read_load(args, *one) for one in zip(args.loads, args.conversations, strict=False)]
        self._out: Path | None = args.out
        if args.out is not None and len(args.model) > 1:
            self._out = args.out.with_stem(f"{args.out.stem}-{model}")
        self._runs: dict[str, dict[str, list[float]]] = {}
        sizes = {load.name: sizes_of(load) for load in self._loads}
        self._result: dict[str, Any] = {"model": model, "loads": sizes}
        folder = model_folder(model, Path(root))
        host_bytes = int(1.3 * max(load.distinct_tokens for load in self._loads) * kv_bytes_per_token(folder))
        disk_path = f"{args.disk_path or root}/kv-{model}"
        self._on_ours: Start = (on_ours, (args, self._loads, model, root, disk_path, host_bytes))
        self._timeout_s = 0.0
        self._peers, self._ours = (Together(stack, lambda: self._timeout_s, self._note) for _ in range(2))
        self._ready: list[str] = []
        self._has_started = False
        for kind in args.peer:
            self._peers.start(PEERS[kind], (on_vllm, (args, self._loads, folder, host_bytes, kind == "host")))

    @property
    def errors(self) -> list[str]:
        """The errors, with the engines' labels."""
        return self._ours.errors + self._peers.errors

    def start_ours(self) -> None:
        """Starts our engine, if it has not been started."""
        if not self._has_started:
            self._has_started = True
            self._ours.start("ours", self._on_ours)

    def await_peers(self, timeout_s: float) -> None:
        """Returns when the peers have started."""
        self._timeout_s = timeout_s
        self._ready = self._peers.ready()

    def measure(self, budget: Budget) -> None:
        """Measures all engines one after another, ends them, and shows what was found."""
        with self._stack:
            self._timeout_s = budget.left_s
            self.start_ours()
            ours = self._ours.ready()
            with measuring():
                for together, labels in ((self._ours, ours), (self._peers, self._ready)):
                    for label in labels:
                        self._timeout_s = budget.left_s
                        together.measure([label])
        save(self._out, self._result | {"all": self._runs, "errors": self.errors})
        show(self._result, self._args.picture)

    def _note(self, label: str, part: Figures) -> None:
        for name, figures in part.items():
            collect(self._runs, name, figures)
            log_line(f"  {label}: {name}: {figures}")
        self._result["runs"] = medians_of(self._runs)
        self._result["ratios"] = ratios_of(self._result["runs"])
        save(self._out, self._result | {"all": self._runs})


def read_load(args: argparse.Namespace, name: str, count: int) -> Load:
    """Returns the first conversations of a record; without the record they are drawn."""
    per_block = args.tokens_per_block or TOKENS_PER_BLOCK[name]
    shrink = _RECORDED_TOKENS[name] / per_block * _ANSWER_SHARE[name]
    by_name: dict[Any, list[Turn]] = defaultdict(list)
    path = find_shared(TRACES[name])
    if path is None:
        print(f"shared/data/{TRACES[name]} is not there: conversations are drawn", file=sys.stderr)
        drawn = [[Turn(tuple(range(1000 * n, 1000 * n + 4 * t)), 8) for t in range(1, 9)] for n in range(count)]
        return Load(name, drawn, per_block, args.concurrency)
    with lzma.open(path, "rt") as lines:
        for row in map(json.loads, lines):
            blocks = row["block_ids"] if name == "agents" else row["hash_ids"][: row["input_length"] // 512]
            # The first block of all Mooncake prompts is the same: the second one names the conversation.
            key = row["session"] if name == "agents" else (blocks[1] if len(blocks) > 1 else None)
            output = row["output_tokens"] if name == "agents" else row["output_length"]
            if blocks and key is not None and (name == "agents" or len(blocks) <= _MOST_BLOCKS):
                by_name[key].append(Turn(tuple(blocks), max(1, int(output / shrink))))
    conversations = [turns for turns in by_name.values() if len(turns) > 2][:count]
    return Load(name, conversations, per_block, args.concurrency)


def sizes_of(load: Load) -> dict[str, int]:
    """Returns how large a load is."""
    turns = [turn for turns in load.conversations for turn in turns]
    return {
        "requests": len(turns),
        "distinct tokens": load.distinct_tokens,
        "prompt tokens": sum(len(turn.blocks) for turn in turns) * load.tokens_per_block,
        "output tokens": sum(turn.output for turn in turns),
    }


def prompts_of(load: Load, number: int) -> list[list[list[int]]]:
    """Returns the prompts of each conversation: the tokens of their blocks, which differ between runs of other numbers,
    and a first one.
    """
    known: dict[int, list[int]] = {}

    def tokens(block: int) -> list[int]:
        if block not in known:
            dice = random.Random(f"{number} {block}")
            known[block] = [dice.randrange(3, 1000) for _ in range(load.tokens_per_block)]
        return known[block]

    return [
        [[1, *(token for block in turn.blocks for token in tokens(block))] for turn in turns]
        for turns in load.conversations
    ]


def replay(server: Server, load: Load, cache: Cache, number: int) -> dict[str, float]:
    """Replays conversations in a closed loop. Returns the figures of that run, which has a number of its own."""
    server.use(cache)
    prompts = prompts_of(load, number)
    waiting = [list(range(len(turns)))[::-1] for turns in load.conversations]
    began_at, lengths, firsts = dict[str, float](), dict[str, int](), list[float]()
    num_prompt = num_cached = num_turns = 0
    before = server.loaded()

    def send(place: int) -> None:
        turn = waiting[place].pop()
        name, prompt = f"{place}.{turn}", prompts[place][turn]
        lengths[name], began_at[name] = len(prompt), time.perf_counter()
        server.add(name, prompt, load.conversations[place][turn].output)

    idle = list(range(len(waiting)))
    began = time.perf_counter()
    for _ in range(min(load.concurrency, len(idle))):
        send(idle.pop(0))
    while server.has_work:
        for name, has_ended, cached in server.step():
            if (at := began_at.pop(name, None)) is not None:
                firsts.append(time.perf_counter() - at)
            if not has_ended:
                continue
            num_turns += 1
            num_prompt += lengths[name]
            num_cached += cached
            place = int(name.partition(".")[0])
            if waiting[place]:
                idle.append(place)  # it waits behind those that have not begun, so that more than fit are alive
            if idle:
                send(idle.pop(0))
    seconds = time.perf_counter() - began
    return {
        "requests/s": num_turns / seconds,
        "seconds": seconds,
        "TTFT p50 ms": 1000 * median(firsts),
        "TTFT p90 ms": 1000 * percentile(firsts, 0.9),
        "hit": num_cached / num_prompt,
        **{name: (count - before[name]) / num_prompt for name, count in server.loaded().items()},
    }


def replay_all(
    args: argparse.Namespace, server: Server, loads: Sequence[Load], caches: Sequence[Sequence[Cache]], prefix: str = ""
) -> Iterator[Figures]:
    """Yields the figures of each load with each of its caches."""
    yield {}  # the engine is ready
    for load, of_load in zip(loads, caches, strict=True):
        replay(server, load, of_load[0], 0)  # mixtures compile kernels for numbers of tokens that come up
    number = 0
    for round_number in range(args.rounds):
        for load, of_load in zip(loads, caches, strict=True):
            for cache in of_load[::-1] if round_number % 2 else of_load:
                number += 1
                yield {f"{load.name}, {prefix}{cache.name}": replay(server, load, cache, number)}


def on_ours(
    args: argparse.Namespace, loads: Sequence[Load], model: str, root: str, disk_path: str, host_bytes: int
) -> Iterator[Figures]:
    """Serves the loads in this process by our engine."""
    room = host_bytes + (64 << 20)  # for models whose elements have four bytes, too
    sizes = {"kv_cache_memory": room, "kv_host_memory": room, "kv_disk_size": 3 * room}
    share = {"gpu_memory_utilization": _MOST_OF_GPU}
    server = Ours(model, root, **sizes, **share, kv_disk_path=disk_path, max_num_seqs=MAX_NUM_SEQS)
    caches = []
    for load in loads:
        of_load, distinct = [Cache("infinite")], load.distinct_tokens
        for times in args.over_commit:
            tokens = load.cache_tokens(times)
            of_load += [
                Cache(f"{times}x, GPU", tokens),
                Cache(f"{times}x, + host", tokens, distinct * 5 // 4),
                Cache(f"{times}x, + host, disk", tokens, distinct * 9 // 16, distinct),
            ]
        caches.append(of_load)
    yield from replay_all(args, server, loads, caches)


def on_vllm(
    args: argparse.Namespace, loads: Sequence[Load], model: str, host_bytes: int, has_host: bool
) -> Iterator[Figures]:
    """Serves the loads in this process by vLLM's engine, step by step."""
    engines.leave_our_packages()
    server = VLLM(model, host_bytes, host_bytes * has_host)
    name = "+ host" if has_host else "GPU"
    caches = [[Cache(f"{times}x, {name}", load.cache_tokens(times)) for times in args.over_commit] for load in loads]
    yield from replay_all(args, server, loads, caches, prefix="vLLM, ")


def ratios_of(runs: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns requests per second over those of an infinite cache, of the GPU alone, and of vLLM with such tiers."""
    found = dict[str, float]()
    for name, row in runs.items():
        load, cache = name.split(", ", 1)
        others = {"infinite": f"{load}, infinite", "vLLM": f"{load}, vLLM, {cache}"}
        if "host" in cache:
            others["GPU"] = f"{load}, {cache.partition(', ')[0]}, GPU"
        for other, its_name in others.items():
            if name != its_name and its_name in runs and not cache.startswith("vLLM"):
                found[f"{name} / {other}"] = row["requests/s"] / runs[its_name]["requests/s"]
    return found


def targets_of(ratios: Iterable[str]) -> dict[str, Target]:
    """Returns the goals that these ratios have."""
    goals = {"+ host / infinite": 0.9, "/ GPU": 0.995, "/ vLLM": 1.0}
    return {
        name: Target(goal, at_least=True) for name in ratios for ending, goal in goals.items() if name.endswith(ending)
    }


def show(result: dict[str, Any], picture: Path | None) -> None:
    """Prints the tables of a result, and draws it."""
    runs, ratios = result.get("runs", {}), result.get("ratios", {})
    figures = list(dict.fromkeys(figure for row in runs.values() for figure in row))
    print_table(["", *figures], [[name, *map(row.get, figures)] for name, row in runs.items()])
    print_verdicts("requests/s", ratios, targets_of(ratios))
    if picture is not None:
        plot(runs, picture)


def plot(runs: dict[str, dict[str, float]], path: Path) -> None:
    """Draws requests per second of each load by over-commit, and those of an infinite cache as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    loads = list(dict.fromkeys(name.split(", ")[0] for name in runs))
    drawn, panels = pyplot.subplots(1, len(loads), figsize=(5 * len(loads), 3.4), squeeze=False)
    for panel, load in zip(panels[0], loads, strict=True):
        rates = {name.split(", ", 1)[1]: row["requests/s"] for name, row in runs.items() if name.startswith(load)}
        panel.axhline(rates.pop("infinite", 0.0), color="black", linewidth=0.8, label="infinite cache")
        cells = {name: name.removeprefix("vLLM, ").partition(", ") for name in rates}
        times = list(dict.fromkeys(cell[0] for cell in cells.values()))
        kinds = list(dict.fromkeys((name.startswith("vLLM"), cell[2]) for name, cell in cells.items()))
        for place, (is_peer, tiers) in enumerate(kinds):
            names = [f"{'vLLM, ' * is_peer}{one}, {tiers}" for one in times]
            middles = [number + (place - (len(kinds) - 1) / 2) * 0.8 / len(kinds) for number in range(len(times))]
            label = f"{'vLLM, ' * is_peer}{tiers}"
            panel.bar(middles, [rates.get(name, 0.0) for name in names], 0.8 / len(kinds), label=label)
        panel.set_xticks(range(len(times)), [f"{one} over-committed" for one in times], fontsize=8)
        panel.set_title(f"{load}, requests/s", fontsize=10)
    panels[0][0].legend(fontsize=7, loc="lower left")
    drawn.tight_layout()
    drawn.savefig(path, dpi=80)


if __name__ == "__main__":
    raise SystemExit(main())
