"""The offline loads: what is asked of an engine, from fixed seeds, and what is taken as its figure.

W1 a mixed batch, sampled; W2 equal requests, greedy; W3 time between tokens by batch; W4 time to the first token by
length; W5 the same behind a cached prefix. All draw from one generator, in this order: prompts are the same for every
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
)


def run_loads(
    engine: Engine,
    sizes: Sizes,
    round_: int = 0,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, float]]:
    """Names and values of the figures that are wanted: tok_s higher is better, ms lower.

    A later round asks for as many tokens with other ids, so that no round finds another's prompts in a cache.
    """

    def ids(count: int, dice: random.Random) -> list[int]:
        return [(dice.randrange(sizes.vocabulary) + round_ * _ROUND_SHIFT) % sizes.vocabulary for _ in range(count)]

    def prompts(count: int, low: int, high: int, dice: random.Random) -> list[list[int]]:
        return [ids(dice.randint(low, high), dice) for _ in range(count)]

    def timed(asked: list[list[int]], limits: list[int], temperature: float = 0.0) -> float:
        begin = time.perf_counter()
        made = engine.run(asked, limits, temperature)
        took = time.perf_counter() - begin
        assert made == sum(limits), f"{made} tokens were made, {sum(limits)} asked for"
        return took

    warm = prompts(min(8, sizes.batch), 100, 200, random.Random(9))
    for temperature in (0.0, 0.6):
        timed(warm, [16] * len(warm), temperature)
    dice = random.Random(0)
    asked = prompts(sizes.batch, *sizes.mixed, dice)
    limits = [dice.randint(*sizes.mixed) for _ in asked]
    if is_wanted("w1 tok_s"):
        yield "w1 tok_s", sum(limits) / timed(asked, limits, 0.6)
    asked = prompts(sizes.batch, sizes.prompt, sizes.prompt, dice)
    if is_wanted("w2 tok_s"):
        yield "w2 tok_s", sizes.batch * sizes.answer / timed(asked, [sizes.answer] * sizes.batch)
    for batch in sizes.latency_batches:
        short, long = (prompts(batch, sizes.prompt, sizes.prompt, dice) for _ in range(2))
        if is_wanted(name := f"itl ms bs {batch}"):
            first_s = timed(short, [1] * batch)
            yield name, (timed(long, [sizes.answer + 1] * batch) - first_s) / sizes.answer * 1e3
    for length in sizes.first_token:
        singles = [prompts(1, length, length, dice) for _ in range(sizes.tries)]
        if is_wanted(name := f"ttft ms {length}"):
            yield name, median(timed(single, [1]) for single in singles) * 1e3
    for length in sizes.prefixes:
        prefix = ids(length, dice)
        asked = [prefix + ids(sizes.suffix, dice) for _ in range(sizes.tries + 1)]
        if is_wanted(name := f"warm ms {length}+{sizes.suffix}"):
            yield name, median([timed([prompt], [1]) for prompt in asked][1:]) * 1e3


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
