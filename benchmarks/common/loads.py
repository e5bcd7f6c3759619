"""The offline loads: what is asked of an engine, from fixed seeds, and what is taken as its figure.

W1 a mixed batch, sampled; W2 equal requests, greedy; W3 time between tokens by batch; W4 time to the first token by
length; W5 the same behind a cached prefix; then top-p sampling, penalties, many short requests, growing chats, and many
questions behind one long shared prompt. All draw from one generator, in this order: prompts are the same for every
engine.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from common.engines import Engine
from common.models import Bound

_ROUND_SHIFT = 7919


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the loads are."""

    vocabulary: int = 150_000
    batch: int = 256
    mixed: tuple[int, int] = (100, 1024)
    prompt: int = 512
    answer: int = 256
    latency_batches: tuple[int, ...] = (1, 8, 32)
    first_token: tuple[int, ...] = (512, 4096, 8192)
    prefixes: tuple[int, ...] = (4096, 4000)
    suffix: int = 128
    tries: int = 5
    sampled: tuple[int, int, int] = (128, 256, 128)
    """Requests, prompt and answer tokens of the loads with top-p and with penalties."""
    short: tuple[int, int] = (512, 32)
    """Short requests, and tokens of both prompt and answer."""
    chats: tuple[int, int, int] = (32, 6, 96)
    """Chats, turns, and tokens that question and answer add in each turn."""
    shared: tuple[int, int, int] = (64, 8192, 64)
    """Requests, tokens of the prompt that they share, tokens of own question and of answer."""
    repeats_shapes: bool = False
    """True to run W1's and each batch's shapes once before they are timed: peers compile kernels at first use."""


FULL = Sizes()
SMOKE = Sizes(
    vocabulary=4000,
    batch=6,
    mixed=(4, 24),
    prompt=16,
    answer=6,
    latency_batches=(1, 2),
    first_token=(16,),
    prefixes=(48, 40),
    suffix=8,
    tries=2,
    sampled=(3, 8, 4),
    short=(6, 4),
    chats=(2, 2, 6),
    shared=(3, 40, 6),
)


def run_loads(
    engine: Engine,
    sizes: Sizes,
    round_: int = 0,
    is_selected: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, float]]:
    """Names and values of the figures that are wanted: tok_s higher is better, ms lower.

    A later round asks for as many tokens with other ids, so that no round finds another's prompts in a cache.
    """

    def ids(count: int, dice: random.Random) -> list[int]:
        return [(dice.randrange(sizes.vocabulary) + round_ * _ROUND_SHIFT) % sizes.vocabulary for _ in range(count)]

    def prompts(count: int, low: int, high: int, dice: random.Random) -> list[list[int]]:
        return [ids(dice.randint(low, high), dice) for _ in range(count)]

    def timed(token_prompts: list[list[int]], limits: list[int], temperature: float = 0.0, **sampling: float) -> float:
        begin = time.perf_counter()
        made = engine.run(token_prompts, limits, temperature, **sampling)
        took = time.perf_counter() - begin
        assert made == sum(limits), f"{made} tokens were made, {sum(limits)} asked for"
        return took

    warm = prompts(min(8, sizes.batch), 100, 200, random.Random(9))
    for temperature in (0.0, 0.6):
        timed(warm, [16] * len(warm), temperature)
    dice = random.Random(0)
    token_prompts = prompts(sizes.batch, *sizes.mixed, dice)
    limits = [dice.randint(*sizes.mixed) for _ in token_prompts]
    if is_selected("w1 tok_s"):
        if sizes.repeats_shapes:
            timed(prompts(sizes.batch, *sizes.mixed, random.Random(1)), [8] * sizes.batch, 0.6)
        yield "w1 tok_s", sum(limits) / timed(token_prompts, limits, 0.6)
    token_prompts = prompts(sizes.batch, sizes.prompt, sizes.prompt, dice)
    if is_selected("w2 tok_s"):
        yield "w2 tok_s", sizes.batch * sizes.answer / timed(token_prompts, [sizes.answer] * sizes.batch)
    for batch in sizes.latency_batches:
        short, long = (prompts(batch, sizes.prompt, sizes.prompt, dice) for _ in range(2))
        if is_selected(name := f"itl ms bs {batch}"):
            if sizes.repeats_shapes:
                timed(prompts(batch, sizes.prompt, sizes.prompt, random.Random(1)), [8] * batch)
            first_s = timed(short, [1] * batch)
            yield name, (timed(long, [sizes.answer + 1] * batch) - first_s) / sizes.answer * 1e3
    for length in sizes.first_token:
        singles = [prompts(1, length, length, dice) for _ in range(sizes.tries)]
        if is_selected(name := f"ttft ms {length}"):
            yield name, median(timed(single, [1]) for single in singles) * 1e3
    for length in sizes.prefixes:
        prefix = ids(length, dice)
        token_prompts = [prefix + ids(sizes.suffix, dice) for _ in range(sizes.tries + 1)]
        if is_selected(name := f"warm ms {length}+{sizes.suffix}"):
            yield name, median([timed([prompt], [1]) for prompt in token_prompts][1:]) * 1e3
    count, length, answer = sizes.sampled
    for name, sampling in (
        ("top-p tok_s", {"top_p": 0.9, "top_k": 50}),
        ("penalties tok_s", {"repetition_penalty": 1.1, "frequency_penalty": 0.2}),
    ):
        token_prompts = prompts(count, length, length, dice)
        if is_selected(name):
            yield name, count * answer / timed(token_prompts, [answer] * count, 0.8, **sampling)
    count, length = sizes.short
    token_prompts = prompts(count, length, length, dice)
    if is_selected("short tok_s"):
        yield "short tok_s", count * length / timed(token_prompts, [length] * count)
    count, turns, length = sizes.chats
    texts = [ids(turns * 2 * length, dice) for _ in range(count)]
    if is_selected("chats tok_s"):
        # What was answered is not looked at: a chat goes on with an answer of its own, of which nothing is cached.
        took = [timed([text[: (2 * turn + 1) * length] for text in texts], [length] * count) for turn in range(turns)]
        yield "chats tok_s", count * turns * length / sum(took)
    count, length, own = sizes.shared
    prefix = ids(length, dice)
    token_prompts = [prefix + ids(own, dice) for _ in range(count)]
    if is_selected("shared tok_s"):
        yield "shared tok_s", count * own / timed(token_prompts, [own] * count)


def bounds(bound: Bound, sizes: Sizes = FULL) -> dict[str, float]:
    """The same figures at the machine's limits."""
    dice = random.Random(1)  # lengths as evenly spread as W1's are
    lengths = [dice.randint(*sizes.mixed) for _ in range(sizes.batch)]
    limits = [dice.randint(*sizes.mixed) for _ in lengths]
    equal = bound.batch_s([sizes.prompt] * sizes.batch, [sizes.answer] * sizes.batch)
    found = {
        "w1 tok_s": sum(limits) / bound.batch_s(lengths, limits),
        "w2 tok_s": sizes.batch * sizes.answer / equal,
    }
    middle = sizes.answer / 2
    for batch in sizes.latency_batches:
        found[f"itl ms bs {batch}"] = bound.decode_s(batch, sizes.prompt + middle) * 1e3
    for length in sizes.first_token:
        found[f"ttft ms {length}"] = bound.prefill_s(length) * 1e3
    for prefix in sizes.prefixes:
        found[f"warm ms {prefix}+{sizes.suffix}"] = bound.prefill_s(sizes.suffix, prefix) * 1e3
    return found
