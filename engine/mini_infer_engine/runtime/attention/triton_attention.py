"""Plans attention of one pass by our kernels: which rows decode, which are prompt chunks, where keys and values go.

`kernels.attention` computes. This module knows neither requests nor whether a pass is captured in a CUDA graph.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mini_infer_engine.kernels.attention.attention_config import HopperPrefillConfig, PrefillShape
from mini_infer_engine.kernels.attention.check_attention import check_attention, check_tile_rows
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import DecodePlan, plan_decode, plan_decode_of_groups
from mini_infer_engine.kernels.attention.prefill_attention import prefill_attention, prefill_shape
from mini_infer_engine.kernels.attention.prefill_rows import UNKNOWN_PAGES, PrefillRows
from mini_infer_engine.kernels.attention.rope_kv import Rotation, rope_kv
from mini_infer_engine.kernels.attention.widen_pages import wide_page_bytes
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.sampling.speculate import ChunkInputs
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.rotary import Rotary
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool

Attend = Callable[..., Tensor]
"""Function of (input of `AttentionPass.attend`, layer, optional out) that returns [tokens, out_width]."""


@dataclass(frozen=True, slots=True)
class TritonAttentionPass:
    """The attention of one pass by our kernels, an `ops.base.AttentionPass`."""

    every_token: Attend
    selected: Attend
    """Attention of the last layer: writes keys and values of all tokens; only those at `logits_indices` attend."""
    logits_indices: Tensor | None
    positions: Tensor  # [tokens]

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Calls `selected` in the last layer if there are logits_indices, otherwise `every_token`."""
        is_selected = layer.is_last and self.logits_indices is not None
        return (self.selected if is_selected else self.every_token)(qkv, layer)


class TritonAttention:
    """Plans passes over one page pool, with a page table for each KV group, which its layers read and write.

    `longest_sequence` in tokens bounds every plan, so none is compiled late.
    """

    most_captured_tokens = 1 << 30

    def __init__(
        self,
        layers: Sequence[Attention],
        pool: KVPool,
        longest_sequence: int,
        kernels: KernelContext,
        run_prefill: Callable[..., Tensor] | None = None,
        *,
        sees_later_keys: bool = False,
    ) -> None:
        self.page_size = pool.spec.page_size
        groups, places = zip(*pool.places, strict=True)
        self.kv_groups: tuple[int, ...] = groups  # of each layer that stores keys and values
        pages = pool.pages.unbind(1)
        self.pages = [pages[place] for place in places]  # of each layer [pages, 2, page_size, kv_heads, head_dim]
        self._sees_later_keys = sees_later_keys
        self.rotations = {layer: _rotation(layer) for layer in layers}
        self.windows = _groups_of_windows(layers, [groups[layer.layer] for layer in layers])
        self._longest_sequence = longest_sequence
        self._kv_heads, self._group = layers[0].num_kv_heads, layers[0].num_heads // layers[0].num_kv_heads
        self._softcap = layers[0].softcap
        self._sinks = next((layer.sinks for layer in layers if layer.sinks is not None), None)
        self._quantized = pool.spec.quantization is not None
        self._policy, self._workspace = kernels.policy, kernels.workspace
        self._run_prefill = run_prefill or self._paged_prefill
        self._shape = PrefillShape(
            pool.spec.dtype, pool.spec.storage_dtype, 0, 0, layers[0].num_heads, self._kv_heads, pool.spec.head_dim,
            self.page_size, None, 0, self._softcap is not None,
        )  # fmt: skip
        self._wide_pages = 0
        if self._quantized and run_prefill is None:
            self._wide_pages = self._policy.scratch_pages(longest_sequence, self._shape)
            page_bytes = wide_page_bytes(self.pages[0], pool.spec.dtype)
            self._workspace.reserve_wide_pages(self._wide_pages * page_bytes)

    def decode(self, tables: Tensor, slots: Tensor, positions: Tensor, kv_lengths: Tensor) -> Attend:
        """Plans decode attention for each window and KV group, with one new token a row."""
        config = self._policy.decode_config(
            positions.shape[0], self._kv_heads, quantized=self._quantized, shape=self._shape
        )
        plans: dict[tuple[int, int | None], DecodePlan] = {}
        for window, groups in self.windows.items():
            made = plan_decode_of_groups(
                slots,
                positions,
                kv_lengths,
                self._kv_heads,
                self._longest_sequence,
                window,
                config=config,
                group=self._group,
                page_tables=tables[groups.start : groups.stop],
                page_size=self.page_size,
            )
            plans |= {(group, window): plan for group, plan in zip(groups, made, strict=True)}
        table_of_group = tables.unbind(0)

        def attend(qkv: Tensor, layer: Attention, out: Tensor | None = None) -> Tensor:
            group = self.kv_groups[layer.layer]
            return decode_attention(
                qkv,
                self.rotations[layer],
                self.pages[layer.layer],
                table_of_group[group],
                plans[group, layer.sliding_window],
                scale=layer.scale,
                workspace=self._workspace,
                softcap=layer.softcap,
                sinks=layer.sinks,
                out=out,
                early=layer.layer > 0,  # before the first one's q, k and v, the plan is made
            )

        return attend

    def check(self, tables: Tensor, slots: Tensor, inputs: ChunkInputs, count: int) -> Attend:
        """Plans attention of `count` new tokens a row by the verification kernel, or by prefill where that is not
        possible.
        """
        rows, queries, table_of_group = slots.shape[0], count * self._group, tables.unbind(0)
        row_bytes = next_power_of_2(self.pages[0].shape[-1]) * self._shape.dtype.itemsize
        config = self._policy.check_config(rows, check_tile_rows(count, self._group), self._kv_heads, row_bytes)
        if config is None or self._quantized or self._run_prefill != self._paged_prefill:
            return check_by_prefill(self.prefill, tables, slots, inputs, count, self._longest_sequence)
        cached, kv_index = inputs.ends - count, inputs.kv_index.unbind(0)
        plans = {
            window: plan_decode(
                slots, cached, cached, self._kv_heads, self._longest_sequence, window, config=config, group=queries
            )
            for window in self.windows
        }

        def attend(qkv: Tensor, layer: Attention, out: Tensor | None = None) -> Tensor:
            group = self.kv_groups[layer.layer]
            return check_attention(
                qkv,
                self.rotations[layer],
                self.pages[layer.layer],
                table_of_group[group],
                plans[layer.sliding_window],
                inputs.positions,
                kv_index[group],
                queries=count,
                scale=layer.scale,
                workspace=self._workspace,
                softcap=layer.softcap,
                sinks=layer.sinks,
                out=out,
            )

        return attend

    def prefill(
        self,
        rows: Sequence[PrefillRows],
        positions: Tensor,
        kv_index: Tensor,
        selected: Tensor | None = None,
        rotations: Mapping[Attention, Rotation] | None = None,
    ) -> Attend:
        """Plans prompt chunks. If `selected` is given, only those tokens attend, and `rows` describe them.

        `rotations` replace those of the layers.
        """
        index_of_group = kv_index.unbind(0)
        rotations = self.rotations if rotations is None else rotations

        def attend(qkv: Tensor, layer: Attention, out: Tensor | None = None) -> Tensor:
            pages, group = self.pages[layer.layer], self.kv_groups[layer.layer]
            q = rope_kv(qkv, rotations[layer], positions, index_of_group[group], pages)
            if selected is not None:
                q = q.index_select(0, selected)
            return self._run_prefill(
                q,
                pages,
                rows[group],
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                softcap=layer.softcap,
                sinks=layer.sinks,
                out=out,
            )

        return attend

    def _rotations_by_section(self, positions: Tensor) -> dict[Attention, Rotation]:
        """Returns the rotation of each layer with a row for each token of a pass, whose positions are [3, tokens]."""
        tables: dict[Rotary, Tensor] = {}
        found: dict[Attention, Rotation] = {}
        for layer, rotation in self.rotations.items():
            assert layer.rotary is not None, "finish_loading comes before the first pass"
            if layer.rotary not in tables:
                tables[layer.rotary] = layer.rotary.by_section(positions)
            found[layer] = replace(rotation, cos_sin=tables[layer.rotary])
        return found

    def most_pages(self, tokens: int, sequences: int) -> int:
        """Returns the pages that scratch memory for widened pages has room for, or no limit if the pass widens none."""
        shape = replace(
            self._shape, tokens=tokens, sequences=sequences, longest_key=self._longest_sequence,
            pages=self._wide_pages, wide_pages=self._wide_pages,
        )  # fmt: skip
        configs = [self._policy.prefill_config(replace(shape, sliding_window=window)) for window in self.windows]
        widens = any(isinstance(config, HopperPrefillConfig) and config.widens for config in configs)
        return self._wide_pages if widens else UNKNOWN_PAGES

    def _paged_prefill(
        self,
        q: Tensor,
        pages: Tensor,
        rows: PrefillRows,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """Runs the faster of our two prefill kernels."""
        shape = prefill_shape(q, pages, rows, sliding_window, softcap, self._wide_pages)
        causal = rows.last_keys is None
        config = self._policy.prefill_config(shape) if causal else self._policy.flash_attention_2_config(shape)
        return prefill_attention(
            q,
            pages,
            rows,
            scale=scale,
            config=config,
            workspace=self._workspace,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            out=out,
        )

    def compile_rare(self, tables: Tensor, dtype: torch.dtype) -> None:
        """Compiles the kernels of passes that are not captured, over page tables [KV groups, 1, width]."""
        if self._run_prefill != self._paged_prefill:
            return  # flash-attn is compiled already
        table, device, pages, softcap, sinks = tables[0], tables.device, self.pages[0], self._softcap, self._sinks
        token = torch.zeros((1, self._kv_heads * self._group, pages.shape[-1]), dtype=dtype, device=device)
        ends = torch.ones(1, dtype=torch.int32, device=device)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        # One token attends. It is told to be many where that decides the variant: whether programs share a sequence.
        for tokens, longest_key in itertools.product((1, 1 << 16), (1 << 10, 1 << 14)):
            q, out = token.expand(tokens, -1, -1), torch.empty_like(token).flatten(1).expand(tokens, -1)
            kinds = [PrefillRows(table, starts, ends, 1, longest_key)]
            if self._sees_later_keys:
                kinds.append(replace(kinds[0], last_keys=ends - 1))
            for window, rows in itertools.product(self.windows, kinds):
                shape = prefill_shape(q, pages, rows, window, softcap)
                tiles = self._policy.flash_attention_2_config(shape)
                prefill_attention(
                    q,
                    pages,
                    rows,
                    scale=1.0,
                    config=tiles,
                    workspace=self._workspace,
                    sliding_window=window,
                    softcap=softcap,
                    sinks=sinks,
                    out=out,
                )
        rows = PrefillRows(table, starts, ends, 1, longest_key, pages=1)
        shape = prefill_shape(token, pages, rows, softcap=softcap, wide_pages=self._wide_pages)
        if hopper := self._policy.hopper_prefill_config(shape):
            prefill_attention(token, pages, rows, scale=1.0, config=hopper, workspace=self._workspace, sinks=sinks)

    def plan(self, inputs: PassInputs, *, every_token: bool) -> TritonAttentionPass:
        """Plans a mixed pass, decode rows first. With `every_token` the logits of all tokens are computed."""
        decodes = inputs.num_decodes
        tables = inputs.page_tables.to(torch.int32)
        decode = prefill = prefill_selected = None
        if decodes:
            own_rows = torch.arange(decodes, dtype=torch.int32, device=tables.device)
            decode = self.decode(tables, own_rows, inputs.positions[:decodes], inputs.kv_lengths[:decodes])
        if len(inputs.counts) > decodes:
            ends = inputs.ends[decodes:].to(torch.int32)
            longest_key = max(start + count for start, count in zip(inputs.starts, inputs.counts, strict=True))
            lengths = map(operator.add, inputs.starts[decodes:], inputs.counts[decodes:])
            pages = sum(cdiv(length, self.page_size) for length in lengths)
            # 32 bits as in the graphs, whose kernel then serves here too and need not be compiled in a request's time.
            positions = inputs.positions[decodes:].to(torch.int32)
            kv_index = (inputs.write_pages * self.page_size + inputs.write_offsets)[:, decodes:].to(torch.int32)

            rotations = last_keys = None
            if (images := inputs.images) is not None:
                if images.positions is not None:
                    rotations = self._rotations_by_section(images.positions[:, decodes:])
                    positions = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
                if images.last_keys is not None:
                    last_keys = images.last_keys[decodes:].to(torch.int32)

            def chunks(query_starts: Tensor, longest_query: int, selected: Tensor | None = None) -> Attend:
                starts = (query_starts[decodes:] - decodes).to(torch.int32)
                rows = PrefillRows.of_groups(tables[:, decodes:], starts, ends, longest_query, longest_key, pages)
                if last_keys is not None and selected is None:  # a chunk's last token sees none after it
                    rows = [replace(of_group, last_keys=last_keys) for of_group in rows]
                return self.prefill(rows, positions, kv_index, selected, rotations)

            prefill = chunks(inputs.query_starts, max(inputs.counts))
            prefill_selected = chunks(inputs.sample_starts, 1, inputs.sample_rows[decodes:] - decodes)
        num_selected = inputs.sample_rows.shape[0]
        return TritonAttentionPass(
            side_by_side(decode, prefill, decodes, inputs.num_tokens),
            side_by_side(decode, prefill_selected, decodes, num_selected),
            None if every_token else inputs.sample_rows,
            inputs.positions,
        )


def check_by_prefill(
    prefill: Callable[..., Attend], tables: Tensor, slots: Tensor, inputs: ChunkInputs, count: int, longest_key: int
) -> Attend:
    """Implements `TritonBackend.check` by a backend's attention of prompt chunks."""
    starts = torch.arange(slots.shape[0] + 1, dtype=torch.int32, device=slots.device) * count
    rows = PrefillRows.of_groups(tables.index_select(1, slots), starts, inputs.ends, count, longest_key)
    return prefill(rows, inputs.positions, inputs.kv_index)


def decodes_before_prefill(prefill: Attend, decode: Attend, num_decodes: int) -> Attend:
    """Returns attention of a captured pass, whose border between decode rows and prompt chunks moves up to
    `num_decodes`.

    Decode rows are written last, since the prefill kernels may write anything to rows that are not theirs.
    """

    def attend(qkv: Tensor, layer: AttentionBlock) -> Tensor:
        mixed = prefill(qkv, layer)
        decode(qkv[:num_decodes], layer, mixed[:num_decodes])
        return mixed

    return attend


def side_by_side(decode: Attend | None, prefill: Attend | None, decodes: int, tokens: int) -> Attend:
    """Returns attention whose first `decodes` tokens are `decode`'s and whose others are `prefill`'s; it returns
    `tokens`.
    """
    if decode is None or prefill is None:
        attend = decode or prefill
        assert attend is not None, "a pass has rows"
        return attend

    def attend_both(qkv: Tensor, layer: AttentionBlock) -> Tensor:
        mixed = qkv.new_empty((tokens, layer.out_width))
        decode(qkv[:decodes], layer, mixed[:decodes])
        prefill(qkv[decodes:], layer, mixed[decodes:])
        return mixed

    return attend_both


def _groups_of_windows(layers: Sequence[Attention], groups: Sequence[int]) -> dict[int | None, range]:
    """Returns a range of KV groups for each window, which contains the groups of all layers with it.

    A window that no sequence leaves may be that of some layers of a group that retains all tokens.
    """
    windows: dict[int | None, range] = {}
    for layer, group in zip(layers, groups, strict=True):
        before = windows.get(layer.sliding_window, range(group, group + 1))
        windows[layer.sliding_window] = range(min(before.start, group), max(before.stop, group + 1))
    return windows


def _rotation(layer: Attention) -> Rotation:
    assert layer.rotary is not None, "finish_loading comes before the first pass"
    if layer.q_norm is None or layer.k_norm is None:
        return Rotation(layer.rotary.table)
    return Rotation(layer.rotary.table, layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
