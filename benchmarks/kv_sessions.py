"""Sessions of agents that return to an engine whose cache is too small for them: what leases, main memory and prefetch
give, in time to the first token and in reuse.

    python -m benchmarks.kv_sessions --out FILE
    python -m benchmarks.kv_sessions --model qwen2.5-7b --speed 10 --tokens-per-block 256 --copies 1 --out FILE

Sessions are those of ../shared/data/agent_sessions.jsonl.xz (without it they are drawn), several times with blocks of
their own, beginning as a Poisson process. Each sends its next request a recorded while after its last answer, of which
the recorded answer is a part where it goes on with the prompt. The engine is ours, and so is what the gateway learns of
return times. A request is held while the engine has more than 0.2 s of prompts to compute, as gateways do, and the
engine is told of it meanwhile.

Without --model nothing is computed: a virtual clock moves on by 6 ms a pass and 25 us a prompt token. Copies between
device and main memory take 0.5 ms and 600,000 tokens/s in each direction, beside passes. With a model the clock is the
machine's, and answers are the model's.

Over-commit is the blocks of live sessions, at the peak, over those of the device. "warm" has room for all of them.
Reuse is the cached prompt tokens over those of warm. A return is a request that is not its session's first. Main memory
has four times the device's blocks.
"""

import argparse
import heapq
import itertools
import json
import lzma
import random
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.routing.shared_data import find_shared
from mini_infer_engine.config.model.kv_groups import UNIFORM
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core import engine as engine_module
from mini_infer_engine.core.batch import NO_SWAP, Batch, Row
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers import tiers as tiers_module
from mini_infer_engine.core.kv_tiers.tier_memory import Moved, PageMove, StateMove
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.core.result import PassResult
from mini_infer_gateway.fleet.return_times import ReturnTimes

TRACE = "agent_sessions.jsonl.xz"
RECORDED_BLOCK_TOKENS = 64
RECORDED_TOKEN_S = 0.010
"""What an answer's token took in the record, as far as is known: the rest of a gap is the tool's or the user's."""
PASS_S, PROMPT_TOKENS_PER_S = 0.006, 40_000.0
COPY_LATENCY_S, COPY_TOKENS_PER_S = 0.0005, 600_000.0
PAGE_TOKENS = 64
WINDOW_S = 0.2
HOST_TIMES = 4
OVER_COMMITS = (1, 2, 4)
VOCABULARY = 1_000
_COPY, _FRESH = 10**8, 10**12
"""Distances between the blocks of copies, and to those that no prompt has."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    blocks: tuple[int, ...]
    answer: tuple[int, ...]
    """Blocks of its answer: those with which the next prompt goes on, if it does."""
    output_tokens: int
    think_s: float
    """Seconds from the end of the answer before it; of a session's first request, the time at which that begins."""


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine by what it has below its device, and what it does with that."""

    name: str
    has_room: bool = False
    """True if all blocks fit on the device."""
    has_host: bool = False
    has_leases: bool = False
    prefetches: bool = False


VARIANTS = (
    Variant("warm", has_room=True),
    Variant("device"),
    Variant("device, leases", has_leases=True),
    Variant("host", has_host=True),
    Variant("host, leases", has_host=True, has_leases=True),
    Variant("host, leases, prefetch", has_host=True, has_leases=True, prefetches=True),
)
_BY_NAME = {variant.name: variant for variant in VARIANTS}


def recorded() -> list[list[dict[str, Any]]]:
    """Returns the rows of each session, in order. Without the trace, sessions whose prompts grow by four blocks."""
    sessions: dict[int, list[dict[str, Any]]] = defaultdict(list)
    if (path := find_shared(TRACE)) is not None:
        with lzma.open(path, "rt") as lines:
            for line in lines:
                row = json.loads(line)
                if row["block_ids"]:
                    sessions[row["session"]].append(row)
    else:
        print(f"shared/data/{TRACE} is not there: sessions are drawn")
        dice = random.Random(0)
        for number in range(25):
            at_s, own = 0.0, [10**6 * number + index for index in range(400)]
            for turn in range(1, dice.randrange(10, 40)):
                blocks, output = [1, 2, 3, *own[: 4 * turn]], dice.randrange(50, 400)
                sessions[number].append({"at_s": at_s, "block_ids": blocks, "output_tokens": output})
                at_s += output * RECORDED_TOKEN_S + dice.expovariate(0.2)
    return [sorted(rows, key=lambda row: row["at_s"]) for _, rows in sorted(sessions.items())]


def load(args: argparse.Namespace) -> list[list[Turn]]:
    """Returns the turns of all sessions."""
    rows_of = recorded()[: args.sessions]
    seen = Counter(block for rows in rows_of for block in {block for row in rows for block in row["block_ids"]})
    dice, start_s, found, fresh = random.Random(args.seed), 0.0, list[list[Turn]](), itertools.count(_FRESH)
    for copy in range(args.copies):
        for rows in dice.sample(rows_of, len(rows_of)):
            start_s += dice.expovariate(args.rate)
            rows = rows[: args.turns]
            blocks = [
                tuple(block if seen[block] > 1 else block + copy * _COPY for block in row["block_ids"]) for row in rows
            ]
            turns = list[Turn]()
            for number, (row, own) in enumerate(zip(rows, blocks, strict=True)):
                think_s = start_s
                if number:
                    gap_s = row["at_s"] - rows[number - 1]["at_s"]
                    think_s = max(0.5 * gap_s, gap_s - rows[number - 1]["output_tokens"] * RECORDED_TOKEN_S)
                following = blocks[number + 1] if number + 1 < len(rows) else ()
                output = max(1, row["output_tokens"] // args.shorter)
                answer = answer_of(own, following, -(-output // args.tokens_per_block), fresh)
                turns.append(Turn(own, answer, output, think_s / args.speed))
            found.append(turns)
    return found


def answer_of(blocks: tuple[int, ...], following: tuple[int, ...], count: int, fresh: Iterator[int]) -> tuple[int, ...]:
    """Returns the blocks of an answer: those of the following prompt after these, or others if it goes on elsewhere."""
    goes_on = following[: len(blocks)] == blocks
    known = following[len(blocks) : len(blocks) + count] if goes_on else ()
    return (*known, *(next(fresh) for _ in range(count - len(known))))


def peak_blocks(spans: dict[int, tuple[float, float]]) -> int:
    """Returns the most blocks that are between their first and their last use at a time."""
    changes = sorted([(first, 1) for first, _ in spans.values()] + [(last, -1) for _, last in spans.values()])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


class Clock:
    """The machine's clock, with the names of the module `time`."""

    monotonic, time = staticmethod(time.monotonic), staticmethod(time.time)

    def wait_until(self, due_s: float) -> None:
        """Returns at this time, or a millisecond later."""
        time.sleep(max(0.0, min(0.001, due_s - time.monotonic())))


class VirtualClock(Clock):
    """A clock that stands still but for what runners and waits add."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.monotonic = self.time = lambda: self.now_s  # type: ignore[method-assign]  # of a real clock

    def wait_until(self, due_s: float) -> None:
        """Goes to this time."""
        self.now_s = max(self.now_s, due_s)


class ModelledHost:
    """Main memory whose copies end when the clock says so, those of each direction one after another."""

    identity, page_bytes, pages_per_state = b"modelled", PAGE_TOKENS, 0
    latency_s, bytes_per_s = COPY_LATENCY_S, COPY_TOKENS_PER_S
    layerwise = None

    def __init__(self, num_pages: int, clock: VirtualClock) -> None:
        self.num_pages, self._clock = num_pages, clock
        self._free_s = {"store": 0.0, "load": 0.0}
        self._jobs: list[tuple[float, int, float, int]] = []

    def _copy(self, direction: str, ticket: int, moves: Sequence[PageMove]) -> None:
        now_s = self._clock.now_s
        begin_s = max(now_s, self._free_s[direction])
        end_s = self._free_s[direction] = begin_s + COPY_LATENCY_S + len(moves) * PAGE_TOKENS / COPY_TOKENS_PER_S
        heapq.heappush(self._jobs, (end_s, ticket, end_s - now_s, len(moves)))

    def store(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Implements `HostMemory`. There are no states."""
        assert not states
        self._copy("store", ticket, moves)

    def load(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Implements `HostMemory`. There are no states."""
        assert not states
        self._copy("load", ticket, moves)

    def take(self) -> list[Moved]:
        """Implements `HostMemory`. There are no bytes: all digests are equal."""
        ended = []
        while self._jobs and self._jobs[0][0] <= self._clock.now_s:
            _, ticket, seconds, count = heapq.heappop(self._jobs)
            ended.append(Moved(ticket, seconds, [0] * count))
        return ended

    def wait(self, timeout_s: float) -> None:
        """Implements `HostMemory`."""
        self._clock.wait_until(min(self._jobs[0][0], self._clock.now_s + timeout_s))

    def page_memory(self, page: int) -> memoryview:
        """Is never called: there is no disk."""
        raise AssertionError(page)


class ModelledRunner:
    """A runner without a model: a launch moves the clock on by the time of the pass."""

    page_size, max_speculative_rows = PAGE_TOKENS, 0
    kv_cache, swap_space = UNIFORM, NO_SWAP

    def __init__(self, num_pages: int, num_host_pages: int, clock: VirtualClock) -> None:
        self.num_pages, self._clock = num_pages, clock
        self.answers: dict[int, list[int]] = {}
        """Tokens of each answer, by its request's `noise_seed`."""
        self.host_memory = ModelledHost(num_host_pages, clock) if num_host_pages else None

    def refuses(self, request: Request) -> None:
        """Refuses nothing."""

    def launch(self, batch: Batch) -> list[list[int]]:
        """Returns the next token of its answer for each row that samples."""
        prompt_tokens = sum(row.count for row in batch.rows[batch.num_decodes :])
        self._clock.now_s += PASS_S + prompt_tokens / PROMPT_TOKENS_PER_S
        return [[self._next(row)] if row.sampling is not None else [] for row in batch.rows]

    def _next(self, row: Row) -> int:
        return self.answers[row.noise_seed][row.output_index]

    def collect(self, handle: list[list[int]]) -> PassResult:
        """Returns the tokens of a launched pass."""
        return PassResult(list(handle))


@dataclass(slots=True)
class Figures:
    """The figures of a run."""

    return_ttft_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    """First and last use of each block."""
    prefetched_tokens: int = 0
    used_tokens: int = 0
    wasted_tokens: int = 0
    seconds: float = 0.0

    def ttft_s(self, quantile: float) -> float:
        """Returns a quantile of the returns' times to first token."""
        ordered = sorted(self.return_ttft_s)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


@dataclass(slots=True)
class _Sent:
    session: int
    turn: int
    due_s: float
    request: Request
    keys: list[bytes]
    before: str
    """Id of the session's request before it; empty if it is the first."""
    first_s: float = 0.0


class Run:
    """Serves all sessions by one engine."""

    def __init__(
        self,
        sessions: list[list[Turn]],
        variant: Variant,
        engine: Engine,
        clock: Clock,
        block_tokens: int,
        answers: dict[int, list[int]],
    ) -> None:
        """`answers` is filled for a modelled runner."""
        self._sessions, self._variant, self._engine, self._clock = sessions, variant, engine, clock
        self._block_tokens, self._answers = block_tokens, answers
        self._returns, self._tokens = ReturnTimes(), dict[int, list[int]]()
        self._due: list[tuple[float, int, int]] = []
        self._held: deque[_Sent] = deque()
        self._running: dict[str, _Sent] = {}
        self.figures = Figures()

    def serve(self) -> Figures:
        """Runs until all sessions have ended."""
        engine, clock = self._engine, self._clock
        start_s = clock.monotonic()
        self._due = [(start_s + turns[0].think_s, number, 0) for number, turns in enumerate(self._sessions)]
        heapq.heapify(self._due)
        while self._due or self._held or self._running:
            self._arrive()
            if engine.has_work:
                for output in engine.step():
                    if output.finish_reason == "error":
                        raise RuntimeError(output.error)
                    if output.token_ids:
                        self._take(output.request_id, output.num_cached_tokens, ended=output.finish_reason is not None)
                continue
            is_copying = engine.write_behind()
            next_s = min(self._due[0][0] if self._due else inf, engine.next_due_s)
            clock.wait_until(min(next_s, clock.monotonic() + (0.001 if is_copying or self._held else inf)))
        self.figures.seconds = clock.monotonic() - start_s
        for tier in engine.stats().kv_tiers.tiers.values():
            self.figures.prefetched_tokens += tier.prefetched_tokens
            self.figures.used_tokens += tier.prefetch_used_tokens
            self.figures.wasted_tokens += tier.prefetch_wasted_tokens
        return self.figures

    def _arrive(self) -> None:
        """Takes the requests that are due, and sends those that the engine has room for."""
        now_s = self._clock.monotonic()
        while self._due and self._due[0][0] <= now_s:
            due_s, session, turn = heapq.heappop(self._due)
            self._held.append(self._sent(session, turn, due_s))
        while self._held and self._has_room():
            sent = self._held.popleft()
            self._running[sent.request.request_id] = sent
            self._engine.add(sent.request)

    def _has_room(self) -> bool:
        rate = self._engine.stats().prefill_tokens_per_s or PROMPT_TOKENS_PER_S
        return self._engine.scheduler.num_queued_tokens < WINDOW_S * rate

    def _sent(self, session: int, turn: int, due_s: float) -> _Sent:
        one = self._sessions[session][turn]
        prompt = [token for block in one.blocks for token in self._tokens_of(block)]
        keys = [block.to_bytes(8, "big") for block in one.blocks]
        self._returns.arrived(keys, is_result=True, now_s=due_s)
        expected = self._returns.expected("agents", "result")
        lease_s = expected.lease_s if self._variant.has_leases else 0.0
        request = Request(
            request_id=f"{session}.{turn}#0",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=one.output_tokens, ignore_eos=True),
            lease_s=lease_s,
            returns_s=min(expected.returns_s, lease_s) if self._variant.prefetches else 0.0,
            noise_seed=session * 10_000 + turn,
        )
        self._answers[request.noise_seed] = [token for block in one.answer for token in self._tokens_of(block)]
        before = f"{session}.{turn - 1}" if turn else ""
        if before and self._variant.prefetches and not self._has_room():
            self._engine.prefetch([before], 10.0)
        return _Sent(session, turn, due_s, request, keys, before)

    def _tokens_of(self, block: int) -> list[int]:
        tokens = self._tokens.get(block)
        if tokens is None:
            dice = random.Random(block)
            tokens = self._tokens[block] = [dice.randrange(10, VOCABULARY) for _ in range(self._block_tokens)]
        return tokens

    def _take(self, name: str, num_cached: int, *, ended: bool) -> None:
        sent, now_s, figures = self._running[name], self._clock.monotonic(), self.figures
        if not sent.first_s:
            sent.first_s = now_s
            figures.cached_tokens += num_cached
            figures.prompt_tokens += len(sent.request.prompt_token_ids)
            if sent.turn:
                figures.return_ttft_s.append(now_s - sent.due_s)
        if not ended:
            return
        del self._running[name]
        turns = self._sessions[sent.session]
        for block in turns[sent.turn].blocks + turns[sent.turn].answer:
            figures.spans[block] = figures.spans.get(block, (sent.due_s, 0.0))[0], now_s
        self._returns.ended(sent.keys, "agents", "result", now_s)
        if sent.turn + 1 < len(turns):
            heapq.heappush(self._due, (now_s + turns[sent.turn + 1].think_s, sent.session, sent.turn + 1))


def longest_tokens(sessions: list[list[Turn]], block_tokens: int) -> int:
    """Returns the most tokens of a request, output included."""
    return max(len(one.blocks) * block_tokens + one.output_tokens for turns in sessions for one in turns) + 1


def modelled(args: argparse.Namespace, sessions: list[list[Turn]]) -> Iterator[dict[str, Any]]:
    """Yields the figures of each over-commit and variant, on a virtual clock."""
    max_model_len = longest_tokens(sessions, args.tokens_per_block)
    pages_per_block = args.tokens_per_block / PAGE_TOKENS

    def run(variant: Variant, num_pages: int) -> Figures:
        clock = VirtualClock()
        engine_module.time = clock  # type: ignore[attr-defined]  # it stands in for the module
        num_pages = max(num_pages, -(-max_model_len // PAGE_TOKENS) + 8)
        runner = ModelledRunner(num_pages, HOST_TIMES * num_pages * variant.has_host, clock)
        settings = EngineSettings(model="modelled", step_depth=0, max_num_seqs=args.max_num_seqs)
        engine = Engine(settings, runner, (), max_model_len, "", record_events=False)  # type: ignore[arg-type]
        return _serve(sessions, variant, engine, clock, args.tokens_per_block, runner.answers)

    try:
        warm = run(VARIANTS[0], 4 * sum(len(one.blocks) for turns in sessions for one in turns))
        peak = int(peak_blocks(warm.spans) * pages_per_block)
        yield from _rows(args, run, warm, peak)
    finally:
        engine_module.time = time


def measured(args: argparse.Namespace, sessions: list[list[Turn]]) -> Iterator[dict[str, Any]]:
    """Yields the figures of each over-commit and variant with a model; one model for all, and an engine for each."""
    from benchmarks.common.models import CONFIGS, model_folder
    from mini_infer_engine.runtime.model_runner import load_runner

    is_named = args.model in CONFIGS
    max_model_len = longest_tokens(sessions, args.tokens_per_block)
    with tempfile.TemporaryDirectory() as folder:
        settings = EngineSettings(
            model=str(model_folder(args.model, Path(folder))) if is_named else args.model,
            load_format="dummy" if is_named else "auto",
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            max_num_seqs=args.max_num_seqs,
            kv_host_memory=args.kv_host_memory,
            **({"kv_cache_memory": args.kv_cache_memory} if args.kv_cache_memory else {}),
        )
        runner: Any = load_runner(settings)
        num_pages, host, clock = runner.num_pages, runner.host_memory, Clock()

        def run(variant: Variant, count: int, served: list[list[Turn]] = sessions) -> Figures:
            runner.num_pages = min(num_pages, max(count, -(-max_model_len // runner.page_size) + 8))
            with _host_of(runner, host, variant):
                engine = Engine(settings, runner, (), max_model_len, "", record_events=False)
                return _serve(served, variant, engine, clock, args.tokens_per_block, {})

        try:
            run(VARIANTS[0], num_pages, [turns[:2] for turns in sessions])  # compiles what the others need
            warm = run(VARIANTS[0], num_pages)
            peak = peak_blocks(warm.spans) * args.tokens_per_block // runner.page_size
            yield from _rows(args, run, warm, peak)
        finally:
            runner.num_pages = num_pages


@contextmanager
def _host_of(runner: Any, host: Any, variant: Variant) -> Iterator[None]:
    """Gives a runner its main memory for a variant that has some, and takes it away for others."""
    runner.host_memory = host if variant.has_host else None
    try:
        yield
    finally:
        runner.host_memory = host


def _rows(
    args: argparse.Namespace, run: Callable[[Variant, int], Figures], warm: Figures, peak: int
) -> Iterator[dict[str, Any]]:
    """Yields the figures of each over-commit of `peak` pages and variant, beside those of an engine with room."""
    for over_commit in args.over_commit:
        yield _row(over_commit, VARIANTS[0], warm, warm)
        for name in args.variants:
            if (variant := _BY_NAME[name]) != VARIANTS[0]:
                yield _row(over_commit, variant, run(variant, int(peak / over_commit)), warm)


def _serve(
    sessions: list[list[Turn]],
    variant: Variant,
    engine: Engine,
    clock: Clock,
    block_tokens: int,
    answers: dict[int, list[int]],
) -> Figures:
    """Serves all sessions. Without prefetch, waiting sequences are not read ahead either."""
    read_ahead = tiers_module.MAX_READ_AHEAD
    tiers_module.MAX_READ_AHEAD = read_ahead * variant.prefetches
    try:
        return Run(sessions, variant, engine, clock, block_tokens, answers).serve()
    finally:
        tiers_module.MAX_READ_AHEAD = read_ahead


def _row(over_commit: float, variant: Variant, figures: Figures, warm: Figures) -> dict[str, Any]:
    row = {
        "over_commit": over_commit,
        "variant": variant.name,
        "reuse": round(figures.cached_tokens / max(1, warm.cached_tokens), 4),
        "ttft_p50_ms": round(1000 * figures.ttft_s(0.5), 2),
        "ttft_p90_ms": round(1000 * figures.ttft_s(0.9), 2),
        "ttft_p50": round(figures.ttft_s(0.5) / warm.ttft_s(0.5), 3),
        "ttft_p90": round(figures.ttft_s(0.9) / warm.ttft_s(0.9), 3),
        "prefetched_tokens": figures.prefetched_tokens,
        "used_tokens": figures.used_tokens,
        "wasted_tokens": figures.wasted_tokens,
        "seconds": round(figures.seconds, 1),
    }
    times = ", ".join(f"{row[f'ttft_{q}_ms']:.1f} ms ({row[f'ttft_{q}']:.2f}x) {q}" for q in ("p50", "p90"))
    prefetch = f"prefetched {figures.prefetched_tokens}, used {figures.used_tokens}, wasted {figures.wasted_tokens}"
    print(
        f"{over_commit:g}x {variant.name:23} reuse {row['reuse']:6.1%} of warm's, TTFT of returns {times}; {prefetch}",
        flush=True,
    )
    return row


def main() -> int:
    """Prints a line for each variant, and writes them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="a few sessions, for a test of the script")
    parser.add_argument("--model", default="", help="a name of common/models.py or a folder; none: passes are modelled")
    parser.add_argument("--over-commit", type=float, nargs="+", default=list(OVER_COMMITS), metavar="TIMES")
    parser.add_argument("--variants", nargs="+", choices=_BY_NAME, default=list(_BY_NAME), help="in this order")
    parser.add_argument("--sessions", type=int, default=25, help="of the 25 that are recorded")
    parser.add_argument("--copies", type=int, default=2, help="of each session, with blocks of its own")
    parser.add_argument("--turns", type=int, default=10**6, help="of each session, at most")
    parser.add_argument("--rate", type=float, default=1.0, help="sessions that begin in a second")
    parser.add_argument("--speed", type=float, default=1.0, help="divides the time between an answer and a return")
    parser.add_argument("--shorter", type=int, default=1, help="divides the tokens of answers")
    parser.add_argument("--tokens-per-block", type=int, default=64, help="the record has 64")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-host-memory", type=int, default=16 << 30, metavar="BYTES")
    parser.add_argument("--kv-cache-memory", type=int, default=0, metavar="BYTES")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.smoke:
        args.sessions, args.copies, args.turns, args.over_commit = 4, 1, 4, [2.0]
    rows = []
    for row in (measured if args.model else modelled)(args, load(args)):
        rows.append(row)
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
