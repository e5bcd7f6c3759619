"""Plans attention by our kernels whose decodes select pages; prompts attend to everything."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mini_infer_engine.config.options.kv_selection import FIRST_PAGES, LAST_PAGES
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import plan_decode
from mini_infer_engine.kernels.attention.page_selection import bound_pages, plan_selection, select_pages
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.attention.rope_kv import Rotation
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.layers.attention import Attention
from mini_infer_engine.runtime.attention.triton_attention import Attend, TritonAttention
from mini_infer_engine.runtime.memory.key_bounds import KeyBounds
from mini_infer_engine.runtime.memory.kv_pool import KVPool


class SelectingTritonAttention(TritonAttention):
    """A `TritonAttention` over a pool with the bounds of its keys, which has one KV group and no windows."""

    def __init__(
        self,
        layers: Sequence[Attention],
        pool: KVPool,
        bounds: KeyBounds,
        longest_sequence: int,
        kernels: KernelContext,
        run_prefill: Callable[..., Tensor] | None = None,
        *,
        sees_later_keys: bool = False,
    ) -> None:
        super().__init__(layers, pool, longest_sequence, kernels, run_prefill, sees_later_keys=sees_later_keys)
        self._bounds = bounds

    def decode(self, tables: Tensor, slots: Tensor, positions: Tensor, kv_lengths: Tensor) -> Attend:
        """Plans decode attention to all pages for the first layers, and to those that each KV head selects for the
        others.
        """
        attend_all = super().decode(tables, slots, positions, kv_lengths)
        rows, budget = positions.shape[0], self._bounds.budget_pages
        config = self._policy.decode_config(rows, self._kv_heads, shape=self._shape)
        selection = plan_selection(
            slots,
            positions,
            kv_lengths,
            tables[0],
            kv_heads=self._kv_heads,
            page_size=self.page_size,
            budget=budget,
            first_pages=FIRST_PAGES,
            last_pages=LAST_PAGES,
            most_pages=cdiv(self._longest_sequence, self.page_size),
            pdl=config.pdl,
        )
        plan = plan_decode(
            torch.arange(rows, dtype=torch.int32, device=positions.device),
            positions,
            selection.lengths,
            self._kv_heads,
            min(budget * self.page_size, self._longest_sequence),
            config=config,
            group=self._group,
            page_tables=selection.selected.flatten(1),
            page_size=self.page_size,
        )

        def attend(qkv: Tensor, layer: Attention, out: Tensor | None = None) -> Tensor:
            bounds = self._bounds.of_layer(layer.layer)
            if bounds is None:
                return attend_all(qkv, layer, out)
            rotation, pages = self.rotations[layer], self.pages[layer.layer]
            mixed = decode_attention(
                qkv,
                rotation,
                pages,
                select_pages(qkv, rotation, bounds, selection),
                plan,
                scale=layer.scale,
                workspace=self._workspace,
                softcap=layer.softcap,
                sinks=layer.sinks,
                out=out,
            )
            bound_pages(pages, selection.kv_index, bounds, pdl=config.pdl)
            return mixed

        return attend

    def prefill(
        self,
        rows: Sequence[PrefillRows],
        positions: Tensor,
        kv_index: Tensor,
        selected: Tensor | None = None,
        rotations: Mapping[Attention, Rotation] | None = None,
    ) -> Attend:
        """Plans prompt chunks, whose attention is followed by the bounds of the pages that they complete."""
        attend_all, index = super().prefill(rows, positions, kv_index, selected, rotations), kv_index[0]

        def attend(qkv: Tensor, layer: Attention, out: Tensor | None = None) -> Tensor:
            mixed = attend_all(qkv, layer, out)
            if (bounds := self._bounds.of_layer(layer.layer)) is not None:
                bound_pages(self.pages[layer.layer], index, bounds)
            return mixed

        return attend
