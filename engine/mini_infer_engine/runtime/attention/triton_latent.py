"""Plans latent attention of one pass by our kernels: decode rows absorbed, prompt chunks decompressed, or absorbed in
graphs.

The number of tokens that a captured pass will read is not known when it is recorded, so that nothing can be
decompressed there: each of its prompt tokens attends to latents as a decode row does. The additional arithmetic is
little beside the rest of so short a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.attention.decode_plan import plan_decode
from mini_infer_engine.kernels.attention.latent_decode import latent_decode
from mini_infer_engine.kernels.attention.latent_prefill import KeyPart, latent_prefill
from mini_infer_engine.kernels.attention.latent_rope import LatentShape, latent_rope
from mini_infer_engine.kernels.attention.prefill_rows import UNKNOWN_PAGES, PrefillRows
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.sampling.speculate import ChunkInputs
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.latent_attention import LatentAttention
from mini_infer_engine.runtime.attention.triton_attention import (
    Attend,
    TritonAttentionPass,
    check_by_prefill,
    side_by_side,
)
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool

_PART_BYTES = 64 << 20
"""Bytes of keys and values that are decompressed at a time, unless the new tokens' own are more."""
_MERGE_GROUP = 2
"""The `group` of `plan_decode`, which affects its merge of splits: each head's is a program of its own."""


class TritonLatentAttention:
    """The `TritonBackend` of latent attention. `longest_sequence` in tokens bounds every plan, so that none is compiled
    late.
    """

    most_captured_tokens = 512
    """Largest captured pass with prompts: in longer ones absorption costs more than launching kernels one by one."""

    def __init__(
        self, layers: Sequence[LatentAttention], pool: KVPool, longest_sequence: int, kernels: KernelContext
    ) -> None:
        assert pool.spec.row_width == layers[0].spec.latent_width, "the pool is of another model"
        self.page_size = pool.spec.page_size
        self.pages = pool.pages.unbind(1)  # of each layer [pages, 1, page_size, 1, latent_width]
        self._longest_sequence = longest_sequence
        self._policy, self._workspace = kernels.policy, kernels.workspace
        self.shape = _shape(layers[0])

    def decode(self, tables: Tensor, slots: Tensor, positions: Tensor, kv_lengths: Tensor) -> Attend:
        """Plans absorbed attention of one new token a row, whose latents are written to the pages."""
        return self._absorbed(tables[0], slots, positions, kv_lengths, writes=True)

    def check(self, tables: Tensor, slots: Tensor, inputs: ChunkInputs, count: int) -> Attend:
        """Plans `count` new tokens a row as prompt chunks."""
        return check_by_prefill(self.prefill, tables, slots, inputs, count, self._longest_sequence)

    def prefill(
        self, rows: Sequence[PrefillRows], positions: Tensor, kv_index: Tensor, selected: Tensor | None = None
    ) -> Attend:
        """Plans prompt chunks of captured passes by absorbed attention, with every token as a row of its own."""
        (chunks,), own_index = rows, kv_index[0]  # latents have one KV group
        tokens = positions.shape[0] if selected is None else selected.shape[0]
        index = torch.arange(tokens, dtype=torch.int32, device=positions.device)
        sequences = torch.searchsorted(chunks.query_starts[1:], index, right=True, out_int32=True)
        sequences = sequences.clamp_(max=chunks.ends.shape[0] - 1)
        cache_indexes = index + (chunks.ends - chunks.query_starts[1:]).index_select(0, sequences)
        if selected is None:
            kv_lengths = torch.where(own_index >= 0, cache_indexes, -1)
            return self._absorbed(chunks.page_tables, sequences, positions, kv_lengths, writes=True)
        is_there = (index >= chunks.query_starts[0]) & (index < chunks.query_starts[-1])
        kv_lengths, last = torch.where(is_there, cache_indexes, -1), positions.index_select(0, selected)
        attend_selected = self._absorbed(chunks.page_tables, sequences, last, kv_lengths, writes=False)

        def attend(packed: Tensor, layer: LatentAttention, out: Tensor | None = None) -> Tensor:
            self._rope(packed, layer, positions, own_index, rotates_queries=False)
            return attend_selected(packed.index_select(0, selected), layer, out)

        return attend

    def _absorbed(
        self, tables: Tensor, slots: Tensor, positions: Tensor, kv_lengths: Tensor, *, writes: bool
    ) -> Attend:
        config = self._policy.latent_decode_config(positions.shape[0])
        plan = plan_decode(slots, positions, kv_lengths, 1, self._longest_sequence, config=config, group=_MERGE_GROUP)

        def attend(packed: Tensor, layer: LatentAttention, out: Tensor | None = None) -> Tensor:
            return latent_decode(
                packed,
                self.shape,
                _table(layer),
                layer.kv_a_layernorm.weight,
                layer.key_up,
                layer.value_up,
                self.pages[layer.layer],
                tables,
                slots,
                positions,
                kv_lengths,
                plan,
                scale=layer.scale,
                workspace=self._workspace,
                writes=writes,
                out=out,
            )

        return attend

    def _rope(
        self, packed: Tensor, layer: LatentAttention, positions: Tensor, kv_index: Tensor, *, rotates_queries: bool
    ) -> None:
        norm, pages = layer.kv_a_layernorm.weight, self.pages[layer.layer]
        latent_rope(
            packed, self.shape, _table(layer), norm, positions, kv_index, pages, rotates_queries=rotates_queries
        )

    def plan(self, inputs: PassInputs, *, every_token: bool) -> TritonAttentionPass:
        """Plans a mixed pass: decode rows absorbed, prompt chunks decompressed."""
        decodes = inputs.num_decodes
        decode: Attend | None = None
        prefill: Attend | None = None
        prefill_selected: Attend | None = None
        if decodes:
            tables = inputs.page_tables.to(torch.int32)
            own_rows = torch.arange(decodes, dtype=torch.int32, device=tables.device)
            decode = self.decode(tables, own_rows, inputs.positions[:decodes], inputs.kv_lengths[:decodes])
        if len(inputs.counts) > decodes:
            context = _Context.of(inputs, self.page_size, self.shape)
            prefill = self._decompressed(context, inputs.query_starts[decodes:] - decodes, None)
            selected = inputs.sample_rows[decodes:] - decodes
            prefill_selected = self._decompressed(context, inputs.sample_starts[decodes:] - decodes, selected)
        num_selected = inputs.sample_rows.shape[0]
        return TritonAttentionPass(
            side_by_side(decode, prefill, decodes, inputs.num_tokens),
            side_by_side(decode, prefill_selected, decodes, num_selected),
            None if every_token else inputs.sample_rows,
            inputs.positions,
        )

    def _decompressed(self, context: "_Context", query_starts: Tensor, selected: Tensor | None) -> Attend:
        """Plans decompressed attention: keys and values are computed from latents part by part, and all heads attend to
        them.
        """
        shape, starts = self.shape, query_starts.to(torch.int32)

        def attend(packed: Tensor, layer: LatentAttention, out: Tensor | None = None) -> Tensor:
            self._rope(packed, layer, context.positions, context.kv_index, rotates_queries=True)
            q = packed[:, : shape.q_width].view(len(packed), shape.heads, shape.qk_dim)
            q = q if selected is None else q.index_select(0, selected)
            if out is None:
                out = q.new_empty((q.shape[0], layer.out_width))
            state_floats = q.shape[0] * shape.heads * (shape.value_dim + 2) if len(context.parts) > 1 else 1
            state = torch.empty(state_floats, dtype=torch.float32, device=q.device)
            for part in context.parts:
                latents = packed[:, shape.q_width :] if part.pages is None else part.read(self.pages[layer.layer])
                kv = torch.mm(latents[:, : shape.kv_rank], layer.kv_up.t())
                kv = kv.view(-1, shape.heads, shape.nope_dim + shape.value_dim)
                latent_prefill(
                    q,
                    kv,
                    latents[:, shape.kv_rank :],
                    shape,
                    starts,
                    context.ends,
                    part.keys,
                    scale=layer.scale,
                    state=state,
                    out=out,
                )
            return out

        return attend

    def most_pages(self, tokens: int, sequences: int) -> int:
        """Returns `UNKNOWN_PAGES`, since any number is possible."""
        return UNKNOWN_PAGES

    def compile_rare(self, tables: Tensor, dtype: torch.dtype) -> None:
        """Does nothing: the kernels of graphs and of eager passes have no further variants."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of the sequences of a pass whose latents are decompressed together."""

    keys: KeyPart
    pages: Tensor | None  # [keys] of each token; None: all are new, and stand in the pass's own memory
    offsets: Tensor | None  # [keys] their places in their pages

    def read(self, pool: Tensor) -> Tensor:
        """Returns their latents, [keys, latent_width], from one layer's pages."""
        assert self.pages is not None, "new tokens are not read from pages"
        return pool[self.pages, 0, self.offsets, 0]


@dataclass(frozen=True, slots=True)
class _Context:
    """The prompt chunks of a pass, with the tokens before them."""

    ends: Tensor  # [sequences] int32
    positions: Tensor  # [tokens] int32, of the new tokens
    kv_index: Tensor  # [tokens] int32, where they are written
    parts: list[_Part]

    @classmethod
    def of(cls, inputs: PassInputs, page_size: int, shape: LatentShape) -> "_Context":
        """Returns the context of all rows after the decode rows."""
        decodes = inputs.num_decodes
        kv_index = (inputs.write_pages[0] * page_size + inputs.write_offsets)[decodes:].to(torch.int32)
        starts, counts = inputs.starts[decodes:], inputs.counts[decodes:]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        device = kv_index.device
        if any(starts):
            token_bytes = shape.heads * (shape.nope_dim + shape.value_dim) * 2
            capacity = max(sum(counts), _PART_BYTES // token_bytes)
            parts = [
                _part_of_pages(ranges, inputs.page_tables[0, decodes:], page_size, device)
                for ranges in part_ranges(ends, capacity)
            ]
        else:
            parts = [_Part(KeyPart(_running_sum(counts, device), 0, is_first=True, is_last=True), None, None)]
        positions = inputs.positions[decodes:].to(torch.int32)
        return cls(inputs.ends[decodes:].to(torch.int32), positions, kv_index, parts)


@dataclass(frozen=True, slots=True)
class PartRange:
    """A range of tokens of every sequence: from `first` on, as many as its entry in `counts`."""

    first: int
    counts: tuple[int, ...]
    is_first: bool
    is_last: bool


def part_ranges(ends: Sequence[int], capacity: int) -> list[PartRange]:
    """Cuts sequences of `ends` tokens into parts of at most `capacity` tokens over all of them, or of one token of
    each.
    """
    step = max(1, capacity // len(ends)) if sum(ends) > capacity else max(ends)
    firsts = range(0, max(ends), step)

    def part(first: int) -> PartRange:
        counts = tuple(max(0, min(end - first, step)) for end in ends)
        return PartRange(first, counts, is_first=first == 0, is_last=first == firsts[-1])

    return list(map(part, firsts))


def _part_of_pages(ranges: PartRange, tables: Tensor, page_size: int, device: torch.device) -> _Part:
    counts = np.array(ranges.counts, dtype=np.int64)
    begins = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(counts.sum()) - np.repeat(begins, counts) + ranges.first
    row_of_key, place_of_key = to_device(np.stack((rows, places)), device).unbind(0)
    keys = KeyPart(_running_sum(ranges.counts, device), ranges.first, ranges.is_first, ranges.is_last)
    return _Part(keys, tables[row_of_key, place_of_key // page_size], place_of_key % page_size)


def _running_sum(counts: Sequence[int], device: torch.device) -> Tensor:
    """Returns the running sum, which begins with 0: [len + 1] int32."""
    return to_device(np.concatenate(([0], np.cumsum(counts))).astype(np.int32), device)


def _shape(layer: LatentAttention) -> LatentShape:
    spec = layer.spec
    return LatentShape(
        heads=layer.num_heads,
        kv_rank=spec.kv_rank,
        nope_dim=spec.nope_dim,
        rope_dim=spec.rope_dim,
        value_dim=spec.value_dim,
        interleaved=spec.interleaved,
        eps=layer.kv_a_layernorm.eps,
    )


def _table(layer: AttentionBlock) -> Tensor:
    assert layer.rotary is not None, "finish_loading comes before the first pass"
    return layer.rotary.table
