"""What is asked of a fleet: recorded and generated requests with their arrival times. Knows no engines and no routing.

A block is an identifier that stands for `block_tokens` tokens and everything before them, as in the Mooncake trace.
"""

import json
import lzma
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from .shared_data import find_shared  # scripts know this package as routing

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_TICK_S = 3.0
"""The trace's clock: its requests arrive in bundles of this spacing, which are spread evenly here."""
TRACE_VARIABLE = "MINI_INFER_MOONCAKE_TRACE"
TRACE_FILE = "mooncake_conversation_trace.jsonl.xz"


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request of a workload."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Of prompt and output together, whole blocks only; shorter where the output's are not known."""
    session: int = -1
    """The chat that it belongs to; -1: not known."""


@dataclass(frozen=True, slots=True)
class Follow:
    """When a request of a closed loop arrives."""

    numbers: tuple[int, ...]
    """Requests that must have ended before."""
    pause_s: float
    """From the end of the last of them: tools run, or a person thinks."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival."""

    name: str
    block_tokens: int
    requests: tuple[SimulatedRequest, ...]
    follows: Mapping[int, "Follow"] = field(default_factory=dict)
    """By number, requests that arrive when others have ended (a closed loop); their own arrival time is a guess."""

    @property
    def duration_s(self) -> float:
        """From the first to the last arrival."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def mean_context_tokens(self) -> float:
        """Prompt and half of the output, on average: what a decode row reads."""
        return sum(request.prompt_tokens + request.output_tokens / 2 for request in self.requests) / len(self.requests)

    def first(self, count: int) -> "Workload":
        """The first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def at(self, duration_s: float) -> "Workload":
        """The same requests, evenly compressed or stretched to arrive within `duration_s`."""
        start, scale = self.requests[0].arrival_s, duration_s / self.duration_s
        requests = (replace(request, arrival_s=(request.arrival_s - start) * scale) for request in self.requests)
        return replace(self, requests=tuple(requests))


def in_order(
    name: str, block_tokens: int, requests: Iterable[SimulatedRequest], follows: Mapping[int, Follow]
) -> Workload:
    """Returns a workload whose requests are numbered by their guessed arrivals, as every workload's are."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    new = {request.number: position for position, request in enumerate(ordered)}
    renamed = {
        new[number]: replace(follow, numbers=tuple(new[one] for one in follow.numbers))
        for number, follow in follows.items()
    }
    numbered = tuple(replace(request, number=position) for position, request in enumerate(ordered))
    return Workload(name, block_tokens, numbered, renamed)


def find_mooncake(path: str | None = None) -> Path | None:
    """The trace's file: as given, else $MINI_INFER_MOONCAKE_TRACE, else shared/data beside the checkout; None: absent.

    The trace is that of Qin et al., Mooncake (2024), https://github.com/kvcache-ai/Mooncake, conversation_trace.jsonl.
    """
    if named := path or os.environ.get(TRACE_VARIABLE):
        return Path(named) if Path(named).is_file() else None
    return find_shared(TRACE_FILE)


def mooncake(path: Path, count: int | None = None) -> Workload:
    """The recorded conversation trace; its last, partial block is left out, since it is never found again."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        rows = [json.loads(line) for _, line in zip(range(count or 1 << 60), lines, strict=False)]
    bundles: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        bundles.setdefault(round(row["timestamp"] / 1000 / MOONCAKE_TICK_S), []).append(position)
    arrivals = {
        position: (tick + order / len(bundle)) * MOONCAKE_TICK_S
        for tick, bundle in bundles.items()
        for order, position in enumerate(bundle)
    }
    requests = tuple(
        SimulatedRequest(
            position,
            arrivals[position],
            row["input_length"],
            max(1, row["output_length"]),
            tuple(row["hash_ids"][: row["input_length"] // MOONCAKE_BLOCK_TOKENS]),
        )
        for position, row in enumerate(rows)
    )
    return Workload("mooncake", MOONCAKE_BLOCK_TOKENS, requests)


def token_ids(request: SimulatedRequest, salt: str, block_tokens: int, vocabulary_size: int) -> list[int]:
    """The prompt: what a block holds follows from its identifier, the rest is the request's own."""
    names = [f"{salt} {block}" for block in request.blocks[: request.prompt_tokens // block_tokens]]
    names += [f"{salt} rest of {request.number} {part}" for part in range(request.prompt_tokens // block_tokens + 1)]
    ids: list[int] = []
    for name in names:
        if len(ids) >= request.prompt_tokens:
            break
        dice = Random(name)
        ids += dice.choices(range(3, vocabulary_size), k=block_tokens)
    return ids[: request.prompt_tokens]


def sessions(
    count: int,
    *,
    seed: int = 1,
    systems: int = 12,
    mean_turns: float = 8.0,
    think_s: float = 40.0,
    block_tokens: int = 128,
) -> Workload:
    """Growing chats that begin with one of `systems` shared prompts of 1,000 to 8,000 tokens.

    Sessions arrive as a Poisson process; turns follow each other after exponential pauses, a new message has 60 to
    4,000 tokens (log-normal), an answer about 250, and each prompt holds all messages and answers before it.
    """
    dice = Random(seed)
    blocks = Blocks(block_tokens)
    roots = [blocks.grow((), dice.randint(1000, 8000)) for _ in range(systems)]
    arrivals: list[SimulatedRequest] = []
    start_s, session = 0.0, 0
    while len(arrivals) < count + count // 4:
        start_s += dice.expovariate(mean_turns / 4.0)
        tokens, chain = roots[min(int(dice.expovariate(0.35)), systems - 1)]
        now_s, session = start_s, session + 1
        for _ in range(1 + int(dice.expovariate(1 / (mean_turns - 1)))):
            message = min(4000, max(60, int(dice.lognormvariate(5.8, 1.0))))
            output = min(1500, max(8, int(dice.lognormvariate(5.3, 0.7))))
            prompt = tokens + message
            tokens, chain = blocks.grow((tokens, chain), message + output)
            arrivals.append(SimulatedRequest(0, now_s, prompt, output, chain, session))
            now_s += 5.0 + dice.expovariate(1 / think_s)
    arrivals.sort(key=lambda request: request.arrival_s)
    skipped = count // 8  # the first minutes have no long chats yet
    chosen = arrivals[skipped : skipped + count]
    return Workload("sessions", block_tokens, tuple(replace(item, number=n) for n, item in enumerate(chosen)))


def zero_reuse(count: int, *, seed: int = 2) -> Workload:
    """Prompts that have nothing in common: 200 to 16,000 tokens (log-normal), answers of about 250."""
    dice = Random(seed)
    blocks = Blocks(MOONCAKE_BLOCK_TOKENS)
    requests, now_s = [], 0.0
    for number in range(count):
        now_s += dice.expovariate(4.0)
        prompt = min(16_000, max(200, int(dice.lognormvariate(8.0, 1.0))))
        output = min(1500, max(8, int(dice.lognormvariate(5.3, 0.7))))
        requests.append(SimulatedRequest(number, now_s, prompt, output, blocks.grow((), prompt)[1]))
    return Workload("zero reuse", MOONCAKE_BLOCK_TOKENS, tuple(requests))


class Blocks:
    """Gives out block identifiers."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens, self._next = block_tokens, 0

    def grow(self, before: tuple[()] | tuple[int, tuple[int, ...]], tokens: int) -> tuple[int, tuple[int, ...]]:
        """(tokens, whole blocks) of `before` and `tokens` more after it."""
        total, chain = before or (0, ())
        total += tokens
        new = total // self._block_tokens - len(chain)
        self._next += new
        return total, (*chain, *range(self._next - new, self._next))


def attainable_hits(workload: Workload, cache_blocks: int) -> list[int]:
    """Tokens of each prompt that one LRU cache of this size holds when requests come one after another.

    What a fleet can reach whose caches have this size in sum: the bound that reuse is measured against.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in workload.requests:
        limit = (request.prompt_tokens - 1) // workload.block_tokens
        count = 0
        for block in request.blocks[:limit]:
            if block not in cache:
                break
            count += 1
        hits.append(count * workload.block_tokens)
        for block in reversed(request.blocks):  # the end of a prefix is the first to be evicted
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > cache_blocks:
            cache.popitem(last=False)
    return hits
