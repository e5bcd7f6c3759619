"""One forward pass as plain data: the only thing that crosses from the scheduler to a runner. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from mini_infer_engine.request import SamplingParams


class Row(msgspec.Struct, gc=False):
    """One sequence's share of a forward pass.

    A batch has hundreds: without cycles they need no garbage collector, whose rounds cost more than their making.
    """

    slot: int
    """Index of the sequence in the runner's per-sequence state, 0 <= slot < max_num_seqs; its own while it runs."""
    start: int
    """Tokens of this sequence that are in the KV cache before the pass: the position of the first new token."""
    count: int
    """New tokens computed by this pass; 1 for a decode."""
    token_ids: Sequence[int] | None
    """The `count` new tokens, or None: the one token that the runner sampled last for this slot, never sent back."""
    page_table: Sequence[int]
    """Ids of the pages that hold tokens [0, start + count), in order; may be longer. Read during launch only."""
    sampling: SamplingParams | None
    """None: a prefill chunk that is not the last, nothing is sampled."""
    noise_seed: int = 0
    output_index: int = 0
    """Output tokens made before this one: with noise_seed it fixes the random choice, whoever shares the batch."""
    suppressed_token_ids: Sequence[int] = ()
    """Tokens that may not be chosen now (EOS before min_tokens)."""


@dataclass(slots=True, frozen=True)
class PageCopy:
    """Copy the first `tokens` tokens of page `source` to page `target`, all layers, before the pass."""

    source: int
    target: int
    tokens: int


@dataclass(slots=True)
class Batch:
    """Decode rows first, then prefill chunks."""

    rows: list[Row]
    num_decodes: int
    """The first `num_decodes` rows have count 1 and sample."""
    copies: list[PageCopy] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model in this pass."""
        return sum(row.count for row in self.rows)


class Runner(Protocol):
    """Executes batches in the order of their launch. The real one has the model and the page pool on a device."""

    page_size: int
    """Tokens a page, a multiple of 16."""
    num_pages: int
    """Pages that the scheduler may hand out, ids 0 .. num_pages - 1; spare pages of the runner's own come on top."""

    def launch(self, batch: Batch) -> Any:
        """Start the pass and return a handle without waiting for the device."""

    def collect(self, handle: Any) -> list[int | None]:
        """Wait for a launched pass: the token sampled for each row, None where `sampling` is None."""
