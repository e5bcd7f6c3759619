"""Copies between a device and the main memory below it, which tests of a CPU's and a GPU's tiers wait for."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from mini_infer_engine.core.kv_tiers.tier_memory import Moved, PageMove
from mini_infer_engine.runtime.memory.host_tier import HostTier


def moved(tier: HostTier) -> Moved:
    """Waits for the one copy that is under way."""
    while True:
        tier.wait(5.0)
        if ended := tier.take():
            (only,) = ended
            return only


def flips_found(
    tier: HostTier,
    load: Callable[[int, Sequence[PageMove]], object],
    digests: Sequence[int],
    num_flips: int,
    target: int,
) -> int:
    """Flips so many bits of main memory, one at a time, and loads its page to the page `target` of the device. Returns
    how many of these loads have another digest than `digests` has for the page.
    """
    draw, found = random.Random(1), 0
    for number in range(num_flips):
        page, word, bit = draw.randrange(len(digests)), draw.randrange(tier.words.shape[1]), draw.randrange(64)
        tier.words[page, word] ^= np.uint64(1 << bit)
        load(number, [PageMove(page, target)])
        found += moved(tier).digests[0] != digests[page]
        tier.words[page, word] ^= np.uint64(1 << bit)
    return found
