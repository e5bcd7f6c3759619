"""Stores and reads a target's hidden states on a GPU, each by one kernel."""

from torch import Tensor

from mini_infer_engine.kernels.hidden_rows import read_rows, store_decoded_rows, store_rows
from mini_infer_engine.ops.base import Ops
from mini_infer_engine.runtime.hidden_states import HiddenStates


class CudaHiddenStates(HiddenStates):
    """The hidden states of the target of one executor."""

    def store(self, ops: Ops, kv_index: Tensor) -> None:
        """Stores the states of the target's last pass, of all tokens; kv_index [tokens], negative: nowhere."""
        store_rows(self.pages.rows, kv_index, self.take(ops))

    def store_decoded(self, ops: Ops, page_table: Tensor, slots: Tensor, kv_lengths: Tensor) -> None:
        """Stores the states of a pass of decode rows: page_table [slots, pages] is read at slots [rows].

        kv_lengths [rows] are the cached tokens before the new one; negative: nowhere.
        """
        store_decoded_rows(self.pages.rows, page_table, slots, kv_lengths, self.take(ops), self.pages.page_size)

    def embed(self, ops: Ops, token_ids: Tensor, kv_index: Tensor) -> Tensor:
        """Returns the draft's input for tokens [tokens] whose entries are at kv_index [tokens], by stored states."""
        return self.draft.combine(ops, self.draft.embed(ops, token_ids), read_rows(self.pages.rows, kv_index))
