"""Defines the pass that the scheduler is planning: its rows so far, and what its later stages need of the earlier."""

from dataclasses import dataclass, field

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.prefix_cache import Hit
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.core.step import Step


class FilledBlocks:
    """The block that each prompt chunk of a pass fills first. Keys are computed once another sequence may need the
    block.

    A new prompt that is alone in its pass does not wait for its keys.
    """

    __slots__ = ("_chunks", "_keys")

    def __init__(self) -> None:
        self._chunks: list[tuple[Sequence, int]] = []
        self._keys: set[bytes] = set()

    def add(self, sequence: Sequence, start: int) -> None:
        """Records that a chunk of this sequence begins at token `start`, if it has a whole block from there on."""
        block = start // BLOCK_SIZE_TOKENS
        if (block + 1) * BLOCK_SIZE_TOKENS <= sequence.num_prefill:
            self._chunks.append((sequence, block))

    def will_serve(self, sequence: Sequence, hit: Hit) -> bool:
        """True if a row of this pass computes the first block that the sequence lacks, so that it will hit it one pass
        later.
        """
        block = hit.num_tokens // BLOCK_SIZE_TOKENS
        if not (self._chunks or self._keys) or (block + 1) * BLOCK_SIZE_TOKENS >= len(sequence.token_ids):
            return False
        self._keys.update(writer.key(index) for writer, index in self._chunks)
        self._chunks.clear()
        return sequence.key(block) in self._keys


@dataclass(slots=True)
class PassPlan:
    """A pass in planning."""

    now_s: float
    """Monotonic time, for policies with latency targets."""
    token_budget: int
    """Tokens that may still be added."""
    max_running: int
    """Sequences that run at once, above which no waiting one starts."""
    step: Step = field(default_factory=lambda: Step(Batch([], 0)))
    prefills: list[Sequence] = field(default_factory=list)
    """Running sequences whose known tokens are not all computed; the first stage finds them."""
    filled_blocks: FilledBlocks = field(default_factory=FilledBlocks)

    def add(self, sequence: Sequence, row: Row) -> None:
        """Adds the row of a prefill chunk."""
        self.step.batch.rows.append(row)
        self.step.sequences.append(sequence)
        sequence.num_computed += row.count
        sequence.in_flight += 1
        self.token_budget = max(0, self.token_budget - row.count)
