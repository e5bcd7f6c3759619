"""Fills the masks of several matchers into one array, on the caller's thread or a pool of threads, whichever is faster.

A mask takes from 4 to 300 us. Waking threads takes tens of microseconds each, and a matcher whose memory is in another
core's cache takes twice its time: with few rows, or slow wakes, no pool pays. Knows neither sequences nor devices.
"""

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher

from mini_infer_engine.core.grammars.matcher import first_line
from mini_infer_engine.structured.limits import MAX_MASK_S

POOLS = (2, 4, 8)
"""Sizes of the thread pools to choose from, as far as there are cores: more threads take longer to wake."""
_TRIALS = 4
"""Consecutive fills by a variant that is tried."""
_TRIED_EVERY = 512
"""Fills of one size until another variant is tried again, which costs a hundredth of them."""
_WEIGHT = 0.2
"""Weight of the newest fill in a variant's mean."""


class EpsilonGreedy:
    """Chooses among several variants by the time that each has taken."""

    def __init__(self, num_arms: int) -> None:
        self._means_s = [0.0] * num_arms
        self._counts = [0] * num_arms

    def choose(self) -> int:
        """Returns the variant to use now: first each in turn, then the fastest, and now and then one of the others."""
        if min(self._counts) < _TRIALS:
            return self._counts.index(min(self._counts))
        fastest = self._means_s.index(min(self._means_s))
        others = [arm for arm in range(len(self._means_s)) if arm != fastest]
        trial, fill = divmod(sum(self._counts), _TRIED_EVERY)
        return others[trial % len(others)] if others and fill < _TRIALS else fastest

    def took(self, arm: int, seconds: float) -> None:
        """Records the time of a fill by the chosen variant."""
        mean = self._means_s[arm] if self._counts[arm] else seconds
        self._means_s[arm] = mean + _WEIGHT * (seconds - mean)
        self._counts[arm] += 1


Job = tuple[LLMatcher, int]
"""A matcher, and the line of its mask."""
DraftJob = tuple[LLMatcher, int, Sequence[int]]
"""A matcher, the line of its mask, and its draft tokens, whose masks are in the lines after it."""
AnyJob = TypeVar("AnyJob", bound=Job | DraftJob)


class GuardedFill(Generic[AnyJob]):
    """Fills the masks of several matchers together, or one by one to find a matcher that is at fault.

    A mask that takes too long is found by the second consecutive fill that is slow.
    """

    def __init__(
        self, together: Callable[[Sequence[AnyJob], np.ndarray], None], alone: Callable[[AnyJob, np.ndarray], None]
    ) -> None:
        self._together = together
        self._alone = alone
        self._was_slow = False
        """True if the last fill took so long that one of its masks may be to blame: the next fill goes one by one."""

    def fill(self, jobs: Sequence[AnyJob], bits: np.ndarray) -> dict[int, str]:
        """Fills `bits`. Returns the first lines of matchers that cannot continue, with the reason: each fails its own
        request.
        """
        started = time.perf_counter()
        try:
            if self._was_slow:
                return self._one_by_one(jobs, bits)
            self._together(jobs, bits)
        except Exception:  # one matcher's, whatever it is, which going one by one finds
            return self._one_by_one(jobs, bits)
        finally:
            self._was_slow = time.perf_counter() - started > MAX_MASK_S
        return {}

    def _one_by_one(self, jobs: Sequence[AnyJob], bits: np.ndarray) -> dict[int, str]:
        faults: dict[int, str] = {}
        for job in jobs:
            started = time.thread_time()
            try:
                self._alone(job, bits)
            except Exception as error:  # of the library: its request ends with it
                faults[job[1]] = f"{type(error).__name__}: {first_line(str(error))}"
            else:
                took = (time.thread_time() - started) / _masks_of(job)
                if took > MAX_MASK_S:
                    faults[job[1]] = f"one token takes {took:.2f} s of CPU, and {MAX_MASK_S:g} are allowed; simplify it"
        return faults


class MaskFiller:
    """Fills the masks of one engine's steps."""

    def __init__(self, threads: int) -> None:
        """Creates pools of at most `threads` threads; with one there is no pool."""
        self._pools = [LLExecutor(num_threads=count) for count in POOLS if count <= threads]
        self._behind = self._pools[-1] if self._pools else LLExecutor(num_threads=1)
        self._bandits: dict[int, EpsilonGreedy] = {}
        """The variants' times, by the number of masks to the next power of two."""
        self._plain = GuardedFill[Job](self._fill_by_fastest_arm, _fill_one)
        self._drafts = GuardedFill[DraftJob](self._drafts_by_pool, _fill_drafts_of_one)

    def fill(self, jobs: Sequence[Job], bits: np.ndarray) -> dict[int, str]:
        """Fills each matcher's whole line of bits [lines, words] uint32, dense.

        Returns the lines of matchers that cannot continue, with the reason.
        """
        return self._plain.fill(jobs, bits)

    def fill_behind(self, jobs: Sequence[DraftJob], bits: np.ndarray) -> dict[int, str]:
        """Fills the same lines as `fill` and, in the lines after each, the masks after its draft tokens.

        Matchers are rolled back to before the draft tokens. Lines after a token that ends an output stay as they are.
        """
        return self._drafts.fill(jobs, bits)

    @staticmethod
    def fill_alone(jobs: Sequence[Job], bits: np.ndarray) -> None:
        """Fills the same lines as `fill` on this thread, without a guard."""
        for job in jobs:
            _fill_one(job, bits)

    def _fill_by_fastest_arm(self, jobs: Sequence[Job], bits: np.ndarray) -> None:
        if len(jobs) < 2 or not self._pools:
            self.fill_alone(jobs, bits)
            return
        size = len(jobs).bit_length()
        if size not in self._bandits:
            self._bandits[size] = EpsilonGreedy(1 + len(self._pools))
        arm, start = self._bandits[size].choose(), time.perf_counter()
        if arm:
            pool = self._pools[arm - 1]
            pool.unsafe_compute_mask_ptr(list(jobs), bits.ctypes.data, bits.strides[0], len(bits))
        else:
            self.fill_alone(jobs, bits)
        self._bandits[size].took(arm, (time.perf_counter() - start) / len(jobs))

    def _drafts_by_pool(self, jobs: Sequence[DraftJob], bits: np.ndarray) -> None:
        listed = [(library, line, list(drafts)) for library, line, drafts in jobs]
        self._behind.unsafe_compute_mask_ptr_with_draft_token(listed, bits.ctypes.data, bits.strides[0], len(bits))


def _fill_one(job: Job, bits: np.ndarray) -> None:
    library, line = job
    library.unsafe_compute_mask_ptr(bits.ctypes.data + line * bits.strides[0], bits.shape[1] * bits.itemsize)


def _fill_drafts_of_one(job: DraftJob, bits: np.ndarray) -> None:
    library, line, drafts = job
    _fill_one((library, line), bits)
    num_consumed = 0
    try:
        for number, token in enumerate(drafts, start=1):
            if library.is_stopped() or not library.consume_token(token):
                return
            num_consumed = number
            _fill_one((library, line + number), bits)
    finally:
        library.rollback(num_consumed)


def _masks_of(job: Job | DraftJob) -> int:
    return 1 + len(job[2]) if len(job) == 3 else 1
