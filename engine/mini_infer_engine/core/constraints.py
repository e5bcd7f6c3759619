"""Prepares sequences whose output must match a grammar, and computes the token masks of a pass. Knows no device.

A grammar is compiled while its sequence waits outside the scheduler. The sequence also waits there while the grammars
of requests in flight use all memory that they may. Masks depend on the tokens before, so a pass with such rows stops at
its logits until the pass before it is committed. Where the pass has draft tokens, the matcher advances along them and
is rolled back.
"""

import time
from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import accumulate, takewhile
from operator import attrgetter
from types import MappingProxyType
from weakref import finalize

import numpy as np
from llguidance import LLMatcher

from mini_infer_engine.config.cores import available_cores, threads_for
from mini_infer_engine.core.bans import completed_bans, longest_before
from mini_infer_engine.core.batch import TokenMasks
from mini_infer_engine.core.grammars.compiler import GrammarCompiler
from mini_infer_engine.core.grammars.mask_filler import MaskFiller
from mini_infer_engine.core.grammars.matcher import GrammarMatcher, TokenSet, first_line, has_tokens, words_of
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.step import Step
from mini_infer_engine.structured.grammar import Grammar

NO_GUESSES: Mapping[int, Collection[int]] = MappingProxyType({})

_LONGEST_WAIT_S = 0.005
"""Longest wait for a grammar while there is nothing else to do: the caller has sockets to look at."""


class NoConstraints:
    """Stands in for `Constraints` where there is no tokenizer: no output can be held to a grammar."""

    are_supported = False
    num_compiling = 0

    def add(self, sequence: Sequence) -> None:
        """Raises ValueError: requests with a grammar are refused before."""
        raise ValueError(f"{sequence.request.request_id} has a grammar, and this engine has no tokenizer")

    def remove(self, request_id: str) -> bool:
        """Returns False: no request waits for its grammar."""
        del request_id
        return False

    def take_ready(self, *, may_wait: bool) -> list[tuple[Sequence, str]]:
        """Returns no sequences."""
        del may_wait
        return []

    def masks(
        self, step: Step, guesses: Mapping[int, Collection[int]] = NO_GUESSES
    ) -> tuple[TokenMasks, list[tuple[Sequence, str]]]:
        """Returns the masks of no rows."""
        del step, guesses
        return TokenMasks([], np.empty((0, 0), dtype=np.uint32)), []


class Constraints:
    """All constrained sequences of one engine."""

    are_supported = True

    def __init__(self, compiler: GrammarCompiler, eos_token_ids: Collection[int]) -> None:
        self._compiler = compiler
        self._eos_token_ids = eos_token_ids
        self._waiting: list[Sequence] = []
        """Sequences whose grammar has no place in memory yet, in the scheduler's order."""
        self._compiling: dict[str, tuple[Sequence, Future[LLMatcher]]] = {}
        self._filler = MaskFiller(threads_for(available_cores()))
        self._eos = TokenSet([token for token in eos_token_ids if token < compiler.vocab_size])
        self._bits = np.empty((0, 0), dtype=np.uint32)

    @property
    def num_compiling(self) -> int:
        """Sequences that wait for their grammar: for its place in memory, or for its compilation."""
        return len(self._waiting) + len(self._compiling)

    def add(self, sequence: Sequence) -> None:
        """Has the sequence's grammar compiled, once there is memory for it, and lets it take the output so far."""
        insort(self._waiting, sequence, key=attrgetter("order"))
        self._compile_waiting()

    def _compile_waiting(self) -> None:
        while self._waiting and self._compiler.reserve(grammar := _grammar_of(self._waiting[0])):
            sequence = self._waiting.pop(0)
            job = self._compiler.compile(grammar, sequence.request.resumed_token_ids)
            self._compiling[sequence.request.request_id] = (sequence, job)

    def remove(self, request_id: str) -> bool:
        """Forgets a sequence that waits for its grammar. Returns False if none with this id does."""
        if (compiling := self._compiling.pop(request_id, None)) is not None:
            sequence, job = compiling
            job.cancel()
            self._compiler.release(_grammar_of(sequence))
            return True
        num_waiting = len(self._waiting)
        self._waiting = [sequence for sequence in self._waiting if sequence.request.request_id != request_id]
        return len(self._waiting) < num_waiting

    def take_ready(self, *, may_wait: bool) -> list[tuple[Sequence, str]]:
        """Returns sequences whose grammar is compiled, each with an error message, empty if it has none. May wait a
        moment.
        """
        self._compile_waiting()
        if may_wait and self._compiling:
            wait([job for _, job in self._compiling.values()], _LONGEST_WAIT_S, FIRST_COMPLETED)
        elif may_wait:
            time.sleep(_LONGEST_WAIT_S)  # sequences whose keys are being received have the memory
        ready = [request_id for request_id, (_, job) in self._compiling.items() if job.done()]
        return [self._ready(*self._compiling.pop(request_id)) for request_id in ready]

    def _ready(self, sequence: Sequence, job: "Future[LLMatcher]") -> tuple[Sequence, str]:
        grammar = _grammar_of(sequence)
        try:
            library = job.result()
        except Exception as error:  # whatever it is, it is this request's alone
            self._compiler.release(grammar)
            return sequence, f"{grammar.param} cannot be enforced: {first_line(str(error))}"
        sampling = sequence.request.sampling
        sequence.matcher = GrammarMatcher(library, sampling, self._compiler.vocab_size, self._eos_token_ids)
        finalize(sequence.matcher, self._compiler.release, grammar).atexit = False  # its memory goes with the matcher
        return sequence, ""

    def masks(
        self, step: Step, guesses: Mapping[int, Collection[int]] = NO_GUESSES
    ) -> tuple[TokenMasks, list[tuple[Sequence, str]]]:
        """Returns the masks of the pass's constrained rows, and sequences that may choose no token, with the reason.

        All tokens before these rows are known. `guesses` has the draft tokens of rows of the batch: such a row also
        gets a mask after each of its draft tokens, up to the first forbidden one.
        """
        pairs = zip(step.batch.rows, step.sequences, strict=True)
        requests = [
            _MaskRequest(index, sequence, sequence.matcher, guesses.get(index, ()), self._compiler.vocab_size)
            for index, (row, sequence) in enumerate(pairs)
            if sequence.matcher is not None and row.sampling is not None and sequence.state is not State.FINISHED
        ]
        if not guesses:
            return self._masks_without_guesses(requests)
        first = list(accumulate((len(one.guesses) + 1 for one in requests), initial=0))
        bits = self._lines(first[-1])
        bits[:] = 0  # behind a guess that ends an output the library writes nothing
        faults = self._compute(requests, first, bits)
        bits = self._cut(bits)
        failed, limits = [], dict[int, int]()
        for one, begin in zip(requests, first[:-1], strict=True):
            allowed, reason = one.restrict(bits[begin : begin + len(one.guesses) + 1], faults.get(begin, ""))
            if reason:
                failed.append((one.sequence, reason))
            if allowed < one.num_guessed:
                limits[one.row] = allowed
        rows = [one.row for one in requests for _ in range(len(one.guesses) + 1)]
        places = [place for one in requests for place in range(len(one.guesses) + 1)]
        return TokenMasks(rows, bits, places, limits), failed

    def _masks_without_guesses(self, requests: "list[_MaskRequest]") -> tuple[TokenMasks, list[tuple[Sequence, str]]]:
        """Computes one mask a row. The device may be waiting for them, so Python time is spent only on rows that need
        it.
        """
        bits = self._lines(len(requests))
        faults = self._filler.fill([(one.matcher.library, line) for line, one in enumerate(requests)], bits)
        bits = self._cut(bits)
        is_empty, has_eos = ~has_tokens(bits), self._eos.are_in(bits)
        failed = []
        for line, one in enumerate(requests):
            looks_at_eos = has_eos[line] and (one.matcher.ignores_eos or not one.matcher.may_end)
            if one.has_rules or is_empty[line] or looks_at_eos or line in faults:
                _, reason = one.restrict(bits[line : line + 1], faults.get(line, ""))
                if reason:
                    failed.append((one.sequence, reason))
        return TokenMasks([one.row for one in requests], bits), failed

    def _lines(self, count: int) -> np.ndarray:
        """Returns a [count, words] uint32 view of memory that the next call reuses: allocating half a megabyte a step
        is costly.
        """
        if count > len(self._bits):
            self._bits = np.empty((count, words_of(self._compiler.mask_tokens)), dtype=np.uint32)
        return self._bits[:count]

    def _cut(self, bits: np.ndarray) -> np.ndarray:
        """Returns the masks of the model's tokens; a tokenizer's tokens that have no logit cannot be chosen."""
        size = self._compiler.vocab_size
        if self._compiler.mask_tokens <= size or not len(bits):
            return bits
        cut = np.ascontiguousarray(bits[:, : words_of(size)])
        if size % 32:
            cut[:, -1] &= np.uint32((1 << size % 32) - 1)
        return cut

    def _compute(self, requests: "list[_MaskRequest]", first: list[int], bits: np.ndarray) -> dict[int, str]:
        """Computes the library's masks of several rows at a time. Returns the lines that have none, with the reason."""
        faults: dict[int, str] = {}
        if plain := [
            (one.matcher.library, begin) for one, begin in zip(requests, first, strict=False) if not one.guesses
        ]:
            faults = self._filler.fill(plain, bits)
        if guessed := [
            (one.matcher.library, begin, one.guesses)
            for one, begin in zip(requests, first, strict=False)
            if one.guesses
        ]:
            faults |= self._filler.fill_behind(guessed, bits)
        return faults


class _MaskRequest:
    """One row's masks: for the token after its known tokens, and for the token after each draft token that fits its
    grammar.
    """

    __slots__ = ("guesses", "has_rules", "matcher", "num_guessed", "row", "sequence")

    def __init__(
        self, row: int, sequence: Sequence, matcher: GrammarMatcher, guesses: Collection[int], vocab_size: int
    ) -> None:
        self.row, self.sequence, self.matcher = row, sequence, matcher
        self.has_rules = matcher.has_rules or sequence.excludes_tokens
        self.num_guessed = len(guesses)
        valid = list(takewhile(lambda token: 0 <= token < vocab_size, guesses)) if guesses else []
        self.guesses = valid[: matcher.library.validate_tokens(valid)] if valid else []

    def restrict(self, bits: np.ndarray, fault: str = "") -> tuple[int, str]:
        """Removes the tokens that the request forbids from the masks [1 + guesses]. `fault` says why there are no
        masks.

        Returns the number of draft tokens that may be accepted, and the reason why no first token is allowed, or an
        empty string if one is.
        """
        if fault:
            bits[:] = ~np.uint32(0)  # what is chosen here is thrown away
            return 0, self.matcher.cannot_go_on(fault)
        sequence, words = self.sequence, self.sequence.request.sampling.bad_words_token_ids
        index = len(sequence.token_ids) - sequence.num_prompt
        before = sequence.token_ids[max(0, len(sequence.token_ids) - longest_before(words)) :].tolist() if words else []
        for place, may_end in enumerate(self.matcher.may_end_along(self.guesses, bits)):
            banned = completed_bans(words, [*before, *self.guesses[:place]]) if words else ()
            reason = self.matcher.restrict(bits[place], sequence.suppressed_at(index + place), banned, may_end=may_end)
            if reason:
                bits[place:] = ~np.uint32(0)  # what is chosen here is thrown away
                return max(0, place - 1), "" if place else reason
        return len(self.guesses), ""


def _grammar_of(sequence: Sequence) -> Grammar:
    grammar = sequence.request.sampling.grammar
    assert grammar is not None
    return grammar


def has_constrained_rows(step: Step) -> bool:
    """Returns True if a row of the pass samples within a grammar."""
    pairs = zip(step.batch.rows, step.sequences, strict=True)
    return any(sequence.matcher is not None and row.sampling is not None for row, sequence in pairs)
