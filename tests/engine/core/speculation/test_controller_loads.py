"""The controller over whole loads, as a table: never much slower than without guesses, and near the best that there is.

Seconds of passes are worked out from rates on an H200 (benchmarks/results/2026-11-23-h200-new-parts.md), noise on top.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from mini_infer_engine.core.speculation.acceptance import FIRST_ACCEPTANCE, with_outcome, worthwhile_drafts
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.core.speculation.pass_times import PassKind

LEVELS = (1, 3, 5)


@dataclass
class Load:
    """Sequences that decode for ever; seconds of a pass by number of guesses, as shares of one without."""

    rows: Callable[[int], int]
    """At a pass."""
    costs: Callable[[int], tuple[float, float, float]]
    """Of `LEVELS`, for so many rows."""
    acceptance: Callable[[int], float]
    """At a pass."""
    reading: float = 0.0
    """Shares of a pass that a draft reads for each pass that it missed, for all rows."""
    stalls: float = 0.0
    """Chance that a pass takes twenty times as long."""
    passes: int = 4_000
    texture: float = 0.0
    """By how much guesses behind the first are less right than it."""
    shares: dict[int, float] = field(default_factory=dict)


def always(value: float) -> Callable[[int], float]:
    return lambda _: value


def rows(count: int) -> Callable[[int], int]:
    return lambda _: count


def seven_b(count: int) -> tuple[float, float, float]:
    """7B with a draft of 0.5B: 3.7 ms at batch 1, and a draft of 0.6 ms a step; large batches are bound by compute."""
    if count <= 8:
        return 1.25, 1.6, 2.0
    return (1.3, 1.9, 2.4) if count <= 32 else (1.7, 2.9, 4.0)


def demo(count: int) -> tuple[float, float, float]:
    """The demo model with its draft, which is a fifth of it, and as many launches."""
    return (1.35, 1.6, 1.9) if count == 1 else (1.7, 2.3, 2.8)


def cheap(count: int) -> tuple[float, float, float]:
    del count
    return 1.02, 1.05, 1.1


LOADS = {
    "7B, batch 1, 0.8": Load(rows(1), seven_b, always(0.8)),
    "7B, batch 32, 0.8": Load(rows(32), seven_b, always(0.8)),
    "7B, batch 32, 0.6": Load(rows(32), seven_b, always(0.6)),
    "7B, batch 128, 0.6": Load(rows(128), seven_b, always(0.6)),
    "7B, batch 128, 0.8": Load(rows(128), seven_b, always(0.8)),
    "7B, batch 128, 0.9": Load(rows(128), seven_b, always(0.9)),
    "demo, batch 1, 0.6": Load(rows(1), demo, always(0.6)),
    "demo, batch 8, 0.6, reads": Load(rows(8), demo, always(0.6), reading=0.01),
    "demo, batch 32, 0.6, reads": Load(rows(32), demo, always(0.6), reading=0.03),
    "demo, batch 128, 0.6, reads": Load(rows(128), demo, always(0.6), reading=0.1),
    "look-up that never hits": Load(rows(32), demo, always(0.0)),
    "look-up that hits now and then": Load(rows(8), demo, lambda at: 0.9 if at % 900 < 100 else 0.05),
    "texts that become hard": Load(rows(8), seven_b, lambda at: 0.85 if at < 2_000 else 0.1),
    "texts that become easy": Load(rows(8), seven_b, lambda at: 0.1 if at < 1_500 else 0.85, passes=8_000),
    "batches that grow and shrink": Load(lambda at: 1 + 127 * (at // 40 % 9) // 8, seven_b, always(0.7)),
    "batches that change with each pass": Load(lambda at: (3, 40, 9, 90)[at % 4], demo, always(0.6)),
    "acceptance that is not what it seems": Load(rows(16), seven_b, always(0.8), texture=0.6),
    "a busy host": Load(rows(8), seven_b, always(0.8), stalls=0.01),
    "guesses that cost nothing": Load(rows(16), cheap, always(0.5)),
}


def run(load: Load, fixed: int | None = None, seed: int = 1) -> float:
    """Tokens a second as a ratio to passes without guesses, with the controller or one number of guesses throughout."""
    dice = random.Random(seed)
    controller = DraftController(LEVELS[-1])
    beliefs = [FIRST_ACCEPTANCE] * 8  # the rows of a larger batch behave as these
    tokens = seconds = missed = 0.0
    for at in range(load.passes):
        count, chance = load.rows(at), load.acceptance(at)
        own = min(count, len(beliefs))
        level = fixed
        if level is None:
            stays = controller.stays_plain(count)
            own_beliefs = [beliefs[row % own] for row in range(count)]
            to_read = partial(round, count * missed)
            level = 0 if stays else controller.choose(own_beliefs, to_read=to_read)
        made, read = float(count), 0
        if level:
            made = 0
            for row in range(own):
                drafts = level if fixed is not None else max(1, worthwhile_drafts(beliefs[row], level))
                accepted = 0
                while accepted < drafts and dice.random() < chance * (1 - load.texture * (accepted > 0)):
                    accepted += 1
                beliefs[row] = with_outcome(beliefs[row], drafts, accepted)
                made += (accepted + 1) * count / own
        seconds_taken = 1.0 if not level else load.costs(count)[LEVELS.index(level)]
        seconds_taken *= 1 + 0.04 * dice.random()
        if level:
            read = round(count * missed)
            seconds_taken += load.reading * missed
            missed = 0
        else:
            missed = min(512, missed + 1) if load.reading else 0
        seconds_taken *= 20 if dice.random() < load.stalls else 1
        kind = PassKind(count, level, read=read)
        controller.observe(kind, [kind], seconds_taken, round(made))
        tokens, seconds = tokens + made / count, seconds + seconds_taken
    return tokens / seconds


@pytest.mark.parametrize("name", LOADS)
def test_controller_is_never_much_slower_than_plain_and_close_to_the_best(name: str) -> None:
    load = LOADS[name]
    plain = run(load, fixed=0)
    ratio = run(load) / plain
    best = max(1.0, *(run(load, fixed=level) / plain for level in LEVELS))
    assert ratio >= 0.985, f"{ratio:.3f} of passes without guesses"
    assert ratio >= 0.88 * best, f"{ratio:.3f}, and {best:.3f} with one number of guesses throughout"
