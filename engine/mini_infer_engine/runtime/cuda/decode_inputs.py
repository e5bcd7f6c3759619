"""Gathers the inputs of a decode step from each row's slot, whatever form the table of embeddings has."""

from torch import Tensor

from mini_infer_engine.kernels.embed_decode import gather_decode_inputs, gather_places
from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.layers.embedding import Embedding


def decode_inputs(slots: Tensor, state: SamplingState, table: Embedding) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (hidden [rows, width], positions, kv_lengths [rows] int64) of the last token in slots [rows] int32."""
    if table.has_groups:
        hidden = table.rows_or_zeros(state.last_tokens[slots.long()].long())
        return hidden, *gather_places(slots, state)
    return gather_decode_inputs(
        slots, state, table.weight, first_token=table.first_token, scales=table.scales, dtype=table.dtype
    )
