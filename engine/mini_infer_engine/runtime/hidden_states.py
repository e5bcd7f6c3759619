"""Collects the hidden states of a target's passes for the draft that reads them, and stores them beside the KV cache.

Every pass stores the states of all its tokens: with guesses or without, by chunks, decodes and verification alike.
"""

from collections.abc import Sequence
from typing import Self

from msgspec.structs import replace
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.hidden_draft import HiddenDraft
from mini_infer_engine.models.hidden_taps import HiddenTaps
from mini_infer_engine.ops.base import Ops
from mini_infer_engine.runtime.memory.hidden_pages import HiddenPages
from mini_infer_engine.runtime.memory.kv_pool import KVPool


class HiddenStates:
    """The hidden states of one target for one draft."""

    def __init__(self, draft: HiddenDraft, pages: HiddenPages) -> None:
        self.draft, self.pages = draft, pages
        self._taps = draft.target.taps = HiddenTaps(draft.tapped_layers)

    @classmethod
    def of(cls, draft: CausalModel | None, pool: KVPool) -> Self | None:
        """Returns the hidden states that this draft reads from the pool of its target, or None if it reads none."""
        if not isinstance(draft, HiddenDraft):
            return None
        assert pool.hidden is not None, "the pool of such a draft's target has hidden pages"
        return cls(draft, pool.hidden)

    def store(self, ops: Ops, kv_index: Tensor) -> None:
        """Stores the states of the target's last pass, of all tokens; kv_index [tokens], negative: nowhere."""
        self.pages.write(kv_index, self.take(ops))

    def take(self, ops: Ops) -> Tensor:
        """Returns what is stored of the tokens of the target's last pass, [tokens, width], and forgets it."""
        return self.draft.fuse(ops, self._taps.take())

    def embed(self, ops: Ops, token_ids: Tensor, kv_index: Tensor) -> Tensor:
        """Returns the draft's input for tokens [tokens] whose entries are at kv_index [tokens], by stored states."""
        return self.draft.combine(ops, self.draft.embed(ops, token_ids), self.pages.read(kv_index))


def entry_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns chunks of known tokens as a draft's chunks: cache indexes are one less, and the first token has none."""
    made = []
    for row in rows:
        assert row.token_ids is not None, "the host knows what a draft reads"
        skipped = 1 if row.start == 0 else 0
        if row.count > skipped:
            changes = {"start": row.start + skipped - 1, "count": row.count - skipped}
            offset = row.position_offset + 1
            made.append(replace(row, **changes, token_ids=row.token_ids[skipped:], position_offset=offset))
    return made
