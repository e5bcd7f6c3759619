"""Sessions of agents on one engine whose KV cache is too small for them: LRU beside leases, by the engine's own page
pool and the gateway's own learning of return times. No GPU: times are modelled.

usage: python -m benchmarks.kv_leases [--json FILE]

Sessions are those of ../shared/data/agent_sessions.jsonl.xz, several times with blocks of their own, beginning as a
Poisson process; blocks that several of the recorded sessions have (their system prompts) are shared by all. Over-commit
is the blocks of sessions between first and last use, at the peak, over those of the device. Prompts are computed one
after another at 40,000 tokens/s, blocks come from main memory at 600,000, and every first token costs one pass more.
An answer takes 10 ms a token, and at most half of the recorded time to the session's next request, which contains the
recorded answer. "Infinite" never evicts. A return is a request that is not its session's first.
"""

import argparse
import heapq
import json
import lzma
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.routing.shared_data import find_shared
from mini_infer_engine.core.page_allocator import PageAllocator
from mini_infer_gateway.fleet.return_times import ReturnTimes

TRACE = "agent_sessions.jsonl.xz"
BLOCK_TOKENS = 64
PREFILL_TOKENS_PER_S, HOST_TOKENS_PER_S = 40_000.0, 600_000.0
PASS_S, TOKEN_S = 0.010, 0.010
COPIES, SESSIONS_PER_S = 6, 1.0
HOST_TIMES = 4
"""Blocks of the host tier, where there is one, over those of the device."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    at_s: float
    is_first: bool
    is_last: bool
    blocks: tuple[int, ...]
    answer_s: float
    """Seconds from its first token to its last."""


def turns(path: Path, seed: int) -> list[Turn]:
    """Returns the requests of all sessions, in order of arrival."""
    sessions: dict[int, list[dict[str, Any]]] = defaultdict(list)
    with lzma.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            sessions[row["session"]].append(row)
    seen = Counter(block for rows in sessions.values() for block in {b for row in rows for b in row["block_ids"]})
    dice, found, start_s = Random(seed), list[Turn](), 0.0
    for copy in range(COPIES):
        for session in dice.sample(sorted(sessions), len(sessions)):
            start_s += dice.expovariate(SESSIONS_PER_S)
            rows = sorted(sessions[session], key=lambda row: row["at_s"])
            for number, row in enumerate(rows):
                blocks = tuple(b if seen[b] > 1 else b + copy * 10**7 for b in row["block_ids"])
                is_last = number == len(rows) - 1
                gap_s = inf if is_last else rows[number + 1]["at_s"] - row["at_s"]
                answer_s = min(TOKEN_S * max(1, row["output_tokens"]), 0.5 * gap_s)
                found.append(Turn(start_s + row["at_s"], not number, is_last, blocks, answer_s))
    return sorted(found, key=lambda turn: turn.at_s)


def peak_blocks(requests: Sequence[Turn]) -> int:
    """Returns the most blocks that are between their first and their last use at a time."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for turn in requests:
        for block in turn.blocks:
            first.setdefault(block, turn.at_s)
            last[block] = turn.at_s
    now = most = 0
    for _, change in sorted([(at_s, 1) for at_s in first.values()] + [(at_s, -1) for at_s in last.values()]):
        now += change
        most = max(most, now)
    return most


class Device:
    """The pages of the engine, by its own pool, and below them blocks in main memory."""

    def __init__(self, num_pages: int, num_host: int) -> None:
        self.pool = PageAllocator(num_pages, BLOCK_TOKENS, self)
        self.page_of: dict[int, int] = {}
        self.block_in: dict[int, int] = {}
        self._host: OrderedDict[int, None] = OrderedDict()
        self._num_host = num_host

    def retains(self, page: int) -> bool:
        """Implements `Contents`: every block is wanted."""
        return page in self.block_in

    def evict(self, page: int) -> None:
        """Implements `Contents`: the block goes to main memory."""
        block = self.block_in.pop(page)
        del self.page_of[block]
        if self._num_host:
            self._host[block] = None
            self._host.move_to_end(block)
            if len(self._host) > self._num_host:
                self._host.popitem(last=False)

    def match(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Returns how many of a prompt's first blocks are cached, and how many of these in main memory alone."""
        count = num_host = 0
        for block in blocks:
            if block not in self.page_of:
                if block not in self._host:
                    break
                num_host += 1
            count += 1
        return count, num_host

    def use(self, blocks: Sequence[int]) -> list[int]:
        """Gives a prompt pages, as far as any are free, and returns them."""
        pages: list[int] = []
        for block in blocks:
            page = self.page_of.get(block)
            if page is not None:
                self.pool.acquire(page)
            elif self.pool.num_free:
                page = self.pool.allocate()
                self.page_of[block], self.block_in[page] = page, block
            else:
                break
            pages.append(page)
        return pages


@dataclass(slots=True)
class Figures:
    """The figures of a run."""

    hit_blocks: int = 0
    return_ttft_s: list[float] = field(default_factory=list)

    def ttft_s(self, quantile: float) -> float:
        """Returns a quantile of the returns' times to first token."""
        return sorted(self.return_ttft_s)[int(quantile * len(self.return_ttft_s))]


def run(requests: Sequence[Turn], num_pages: int, *, leases: bool, host: bool, done: bool) -> Figures:
    """Serves all requests. With `done`, clients say which request is their session's last."""
    device, returns, figures = Device(num_pages, HOST_TIMES * num_pages * host), ReturnTimes(), Figures()
    ends: list[tuple[float, int, Turn, list[int], list[bytes]]] = []
    free_s = 0.0
    for number, turn in enumerate(requests):
        while ends and ends[0][0] <= turn.at_s:
            _end(device, returns, heapq.heappop(ends), leases=leases, done=done)
        keys = [block.to_bytes(8, "big") for block in turn.blocks]
        returns.arrived(keys, is_result=True, now_s=turn.at_s)
        device.pool.advance(turn.at_s)
        hit, num_host = device.match(turn.blocks[:-1])  # the last block is computed for its logits
        figures.hit_blocks += hit
        began_s = max(turn.at_s, free_s)
        missing = len(turn.blocks) - hit
        free_s = began_s + BLOCK_TOKENS * (missing / PREFILL_TOKENS_PER_S + num_host / HOST_TOKENS_PER_S)
        first_s = free_s + PASS_S
        if not turn.is_first:
            figures.return_ttft_s.append(first_s - turn.at_s)
        pages = device.use(turn.blocks)
        heapq.heappush(ends, (first_s + turn.answer_s, number, turn, pages, keys))
    return figures


def _end(
    device: Device,
    returns: ReturnTimes,
    ended: tuple[float, int, Turn, list[int], list[bytes]],
    *,
    leases: bool,
    done: bool,
) -> None:
    now_s, _, turn, pages, keys = ended
    device.pool.advance(now_s)
    pages.reverse()
    if leases:
        lease_s = -1.0 if done and turn.is_last else returns.lease_s("agents", "result")
        if lease_s:
            device.pool.lease(pages, lease_s, is_pinned=False)
    returns.ended(keys, "agents", "result", now_s)
    device.pool.release_all(pages)


VARIANTS = {
    "LRU": {"leases": False, "host": False, "done": False},
    "leases": {"leases": True, "host": False, "done": False},
    "leases, done": {"leases": True, "host": False, "done": True},
    "LRU + host": {"leases": False, "host": True, "done": False},
    "leases + host": {"leases": True, "host": True, "done": False},
}


def main() -> int:
    """Prints reuse over that of an infinite cache, and times to the first token of returns over those of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="writes the figures there, too")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="loads to average over (default: 3)")
    options = parser.parse_args()
    path = find_shared(TRACE)
    if path is None:
        print(f"shared/data/{TRACE} is not there: nothing to serve")
        return 1
    rows: list[dict[str, Any]] = []
    for over_commit in (1, 2, 4):
        for name, variant in VARIANTS.items():
            reuse, p50, p90 = list[float](), list[float](), list[float]()
            for seed in range(options.seeds):
                requests = turns(path, seed)
                infinite = run(requests, 10**6, leases=False, host=False, done=False)
                figures = run(requests, peak_blocks(requests) // over_commit, **variant)
                reuse.append(figures.hit_blocks / infinite.hit_blocks)
                p50.append(figures.ttft_s(0.5) / infinite.ttft_s(0.5))
                p90.append(figures.ttft_s(0.9) / infinite.ttft_s(0.9))
            mean = {
                key: round(sum(values) / len(values), 3)
                for key, values in (("reuse", reuse), ("ttft_p50", p50), ("ttft_p90", p90))
            }
            rows.append({"over_commit": over_commit, "variant": name, **mean})
            times = f"{mean['ttft_p50']:.2f} (p50), {mean['ttft_p90']:.2f} (p90) times infinite's"
            print(
                f"{over_commit}x {name:14} reuse {mean['reuse']:.1%} of infinite, TTFT of returns {times}", flush=True
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
