"""Sequences whose output is held to a grammar: their way into line, and the masks of a pass. Knows no device.

A grammar is compiled while its sequence waits outside the scheduler. Masks follow from the tokens before, so a pass
with such rows goes as far as its logits until the pass before it is committed.
"""

from collections.abc import Sequence as Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait

import numpy as np
from llguidance import LLExecutor, LLMatcher

from mini_infer_engine.core.batch import Row, TokenMasks
from mini_infer_engine.core.scheduler import Step
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.structured.compiler import GrammarCompiler
from mini_infer_engine.structured.matcher import GrammarMatcher, first_line, words_of

_LONGEST_WAIT_S = 0.005
"""For a grammar, while nothing else is to be done: the caller has sockets to look at."""


class Constraints:
    """All constrained sequences of one engine."""

    def __init__(self, compiler: GrammarCompiler, eos_token_ids: Collection[int]) -> None:
        self._compiler = compiler
        self._eos_token_ids = eos_token_ids
        self._compiling: dict[str, tuple[Sequence, Future[LLMatcher]]] = {}
        self._executor = LLExecutor()

    @property
    def num_compiling(self) -> int:
        """Sequences that wait for their grammar."""
        return len(self._compiling)

    def add(self, sequence: Sequence) -> None:
        """Have its grammar compiled, and let it take the output that there is already."""
        grammar = sequence.request.sampling.grammar
        assert grammar is not None
        job = self._compiler.compile(grammar.text, sequence.request.resumed_token_ids)
        self._compiling[sequence.request.request_id] = (sequence, job)

    def forget(self, request_id: str) -> bool:
        """Whether it was waiting for its grammar, which nobody wants any more."""
        waiting = self._compiling.pop(request_id, None)
        if waiting is None:
            return False
        waiting[1].cancel()
        return True

    def take_ready(self, *, may_wait: bool) -> list[tuple[Sequence, str]]:
        """Sequences whose grammar is compiled, each with what is wrong with it; waits a moment for the first."""
        if may_wait:
            wait([job for _, job in self._compiling.values()], _LONGEST_WAIT_S, FIRST_COMPLETED)
        ready = [request_id for request_id, (_, job) in self._compiling.items() if job.done()]
        return [self._ready(*self._compiling.pop(request_id)) for request_id in ready]

    def _ready(self, sequence: Sequence, job: "Future[LLMatcher]") -> tuple[Sequence, str]:
        sampling = sequence.request.sampling
        assert sampling.grammar is not None
        try:
            library = job.result()
        except Exception as error:  # whatever it is, it is this request's alone
            return sequence, f"{sampling.grammar.param} cannot be enforced: {first_line(str(error))}"
        sequence.matcher = GrammarMatcher(library, sampling, self._compiler.vocab_size, self._eos_token_ids)
        return sequence, ""

    def masks(self, step: Step) -> tuple[TokenMasks, list[tuple[Sequence, str]]]:
        """Masks of the pass's constrained rows, all tokens before which are known; and rows that may choose none."""
        asked = [
            (index, row, sequence, sequence.matcher)
            for index, (row, sequence) in enumerate(zip(step.batch.rows, step.sequences, strict=True))
            if sequence.matcher is not None and row.sampling is not None and sequence.state is not State.FINISHED
        ]
        bits = np.zeros((len(asked), words_of(self._compiler.vocab_size)), dtype=np.uint32)
        if asked:
            jobs = [(matcher.library, place) for place, (*_, matcher) in enumerate(asked)]
            self._executor.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, bits.strides[0], len(asked))
        failed = []
        for place, (_, row, sequence, matcher) in enumerate(asked):
            if reason := matcher.restrict(bits[place], row.suppressed_token_ids, _banned(row, sequence)):
                failed.append((sequence, reason))
                bits[place] = ~np.uint32(0)  # its token is thrown away
        return TokenMasks([index for index, *_ in asked], bits), failed


def has_constrained_rows(step: Step) -> bool:
    """Whether a row of the pass samples within a grammar."""
    pairs = zip(step.batch.rows, step.sequences, strict=True)
    return any(sequence.matcher is not None and row.sampling is not None for row, sequence in pairs)


def _banned(row: Row, sequence: Sequence) -> list[int]:
    """What the row may not choose, now that the token before it is known."""
    last = sequence.token_ids[-1]
    return [token for before, token in row.banned if before is None or before == last]
