"""Masks of several matchers into one array: on the caller's thread or on a pool, whichever has taken less time.

A mask takes from 4 to 300 us. Waking a pool takes some 100 us, and a matcher whose memory is in another core's cache
twice its time: on most machines a pool begins to pay only with many rows. Knows neither sequences nor devices.
"""

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher

MOST_THREADS = 8
"""Of the pool."""
_TRIED_EVERY = 64
"""Fills of one size until the other way is tried again: it costs a hundredth of them."""
_WEIGHT = 0.2
"""Of the newest fill in a way's mean."""


class FasterWay:
    """Which of two ways to go, by the time that each has taken: alone (0) or together (1)."""

    def __init__(self) -> None:
        self._means_s: list[float | None] = [None, None]
        self._count = 0

    def choose(self) -> int:
        """The way to go now: the faster one, every now and then the other, and first each of them."""
        self._count += 1
        alone, together = self._means_s
        if alone is None or together is None:
            return 0 if alone is None else 1
        faster = int(together < alone)
        return 1 - faster if self._count % _TRIED_EVERY == 0 else faster

    def took(self, way: int, seconds: float) -> None:
        """What the way that was chosen has taken. A first time is not told apart from others: means forget it."""
        mean = self._means_s[way]
        self._means_s[way] = seconds if mean is None else mean + _WEIGHT * (seconds - mean)


class MaskFiller:
    """Of one engine. With one thread there is no pool."""

    def __init__(self, threads: int) -> None:
        """`threads`: that the pool may have."""
        self._executor = LLExecutor(num_threads=min(threads, MOST_THREADS))
        self._has_pool = threads > 1
        self._ways: dict[int, FasterWay] = {}
        """By the number of masks, to the next power of two."""

    def fill(self, jobs: Sequence[tuple[LLMatcher, int]], bits: np.ndarray) -> None:
        """The mask of each matcher into its line of bits [lines, words] uint32, dense; the whole line."""
        if len(jobs) < 2 or not self._has_pool:
            self.fill_alone(jobs, bits)
            return
        ways = self._ways.setdefault(len(jobs).bit_length(), FasterWay())
        way, start = ways.choose(), time.perf_counter()
        (self._fill_together if way else self.fill_alone)(jobs, bits)
        ways.took(way, (time.perf_counter() - start) / len(jobs))

    def fill_behind(self, jobs: Sequence[tuple[LLMatcher, int, Sequence[int]]], bits: np.ndarray) -> None:
        """The same and, in the lines after it, behind each of a matcher's guesses, of which it has taken none then."""
        asked = [(library, line, list(guesses)) for library, line, guesses in jobs]
        self._executor.unsafe_compute_mask_ptr_with_draft_token(asked, bits.ctypes.data, bits.strides[0], len(bits))

    @staticmethod
    def fill_alone(jobs: Sequence[tuple[LLMatcher, int]], bits: np.ndarray) -> None:
        """The same as `fill` on this thread."""
        address, stride, size = bits.ctypes.data, bits.strides[0], bits.shape[1] * bits.itemsize
        for library, line in jobs:
            library.unsafe_compute_mask_ptr(address + line * stride, size)

    def _fill_together(self, jobs: Sequence[tuple[LLMatcher, int]], bits: np.ndarray) -> None:
        self._executor.unsafe_compute_mask_ptr(list(jobs), bits.ctypes.data, bits.strides[0], len(bits))
