"""The offline loads: what is asked of an engine, from fixed seeds, and what is taken as its figure.

W1 a mixed batch, sampled; W2 equal requests, greedy; inter-token latency by batch; time to the first token by length,
new and behind a cached prefix; one long context. All draw from one generator, in this order: prompts are the same for
every engine.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from common.engines import Engine
from common.models import Bound


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
    long_context: int = 15_000
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
    long_context=100,
    tries=2,
)


def run_loads(engine: Engine, sizes: Sizes, say: Callable[[str], None], *, is_slow: bool = False) -> dict[str, float]:
    """Every figure by name: tok_s higher is better, ms lower. A slow engine is spared the large batches."""
    figures: dict[str, float] = {}

    def prompts(count: int, low: int, high: int, dice: random.Random) -> list[list[int]]:
        return [[dice.randrange(sizes.vocabulary) for _ in range(dice.randint(low, high))] for _ in range(count)]

    def timed(asked: list[list[int]], limits: list[int], temperature: float = 0.0) -> float:
        begin = time.perf_counter()
        made = engine.run(asked, limits, temperature)
        took = time.perf_counter() - begin
        assert made == sum(limits), f"{made} tokens were made, {sum(limits)} asked for"
        return took

    def note(name: str, value: float) -> None:
        figures[name] = value
        say(f"  {name} {value:,.2f}")

    def latency_ms(batch: int, length: int, dice: random.Random) -> float:
        first = timed(prompts(batch, length, length, dice), [1] * batch)
        return (timed(prompts(batch, length, length, dice), [sizes.answer + 1] * batch) - first) / sizes.answer * 1e3

    timed(
        prompts(2 if is_slow else min(8, sizes.batch), 100, 200, random.Random(9)),
        [16] * (2 if is_slow else min(8, sizes.batch)),
    )
    dice = random.Random(0)
    asked = prompts(sizes.batch, *sizes.mixed, dice)
    limits = [dice.randint(*sizes.mixed) for _ in asked]
    if not is_slow:
        note("w1 tok_s", sum(limits) / timed(asked, limits, 0.6))
    asked = prompts(sizes.batch, sizes.prompt, sizes.prompt, dice)
    if not is_slow:
        note("w2 tok_s", sizes.batch * sizes.answer / timed(asked, [sizes.answer] * sizes.batch))
    for batch in sizes.latency_batches:
        if not is_slow or batch == 1:
            note(f"itl ms bs {batch}", latency_ms(batch, sizes.prompt, dice))
    for length in sizes.first_token:
        note(
            f"ttft ms {length}", median(timed(prompts(1, length, length, dice), [1]) for _ in range(sizes.tries)) * 1e3
        )
    if is_slow:
        return figures
    for prefix_length in sizes.prefixes:
        prefix = prompts(1, prefix_length, prefix_length, dice)[0]
        times = [timed([prefix + prompts(1, sizes.suffix, sizes.suffix, dice)[0]], [1]) for _ in range(sizes.tries + 1)]
        note(f"warm ms {prefix_length}+{sizes.suffix}", median(times[1:]) * 1e3)
    note(f"itl ms bs 1 at {sizes.long_context}", latency_ms(1, sizes.long_context, dice))
    return figures


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
    found[f"itl ms bs 1 at {sizes.long_context}"] = bound.decode_s(1, sizes.long_context + middle) * 1e3
    return found
