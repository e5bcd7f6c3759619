"""Compacts the caches of sequences at the end of a pass: observes attention, chooses tokens, and copies them together.

Plain torch on any device. Attention is observed beside the backend's own, in passes that are launched layer by layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mini_infer_engine.config.options.kv_policies import NUM_SINKS, OBSERVATION_WINDOW, SNAPKV_KERNELS
from mini_infer_engine.core.batch import Row
from mini_infer_engine.device import to_device
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.norm import rms_norm
from mini_infer_engine.layers.rotary import Rotary, rotate_
from mini_infer_engine.ops.base import AttentionPass
from mini_infer_engine.runtime.attention.page_scores import key_bounds
from mini_infer_engine.runtime.eviction.scores import (
    attention_sums,
    h2o_kept,
    snapkv_kept,
    snapkv_scores,
    streaming_llm_kept,
)
from mini_infer_engine.runtime.memory.kv_pool import KVPool


@dataclass(slots=True)
class Observation:
    """The queries and scores that a pass observes of one row, layer by layer."""

    tokens: slice
    """The row's last tokens in the pass, whose queries are observed."""
    num_keys: int
    pages: Tensor  # [pages] int64, those of the keys
    counts_attention: bool
    """True if attention is added to the sums of the pool, and not scored for a compaction."""
    kernel: int
    """Tokens over which scores are averaged."""
    scores: list[Tensor] = field(default_factory=list)  # [kv_heads, keys before those of the queries] of each layer


class Compactor:
    """Compacts sequences of one page pool."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._observations: dict[int, Observation] = {}
        """Observations of the pass that is being launched, by slot."""

    def observe(self, rows: Sequence[Row], attention: AttentionPass) -> AttentionPass:
        """Returns the attention of a pass with these rows, which observes what their compactions need."""
        begin, observations = 0, list[Observation]()
        for row in rows:
            begin += row.count
            if not needs_queries(row):
                continue
            num_keys = row.start + row.count
            tokens = slice(begin - (row.count if row.counts_attention else OBSERVATION_WINDOW), begin)
            pages = self._page_ids(row.page_table, num_keys)
            kernel = 1 if row.compaction is None else SNAPKV_KERNELS.get(row.compaction.policy, 1)
            observation = Observation(tokens, num_keys, pages, row.counts_attention, kernel)
            self._observations[row.slot] = observation
            observations.append(observation)
        return ObservingAttention(attention, self._pool, observations) if observations else attention

    def compact(self, rows: Sequence[Row]) -> None:
        """Compacts the caches of those of a computed pass's rows that are to be."""
        for row in rows:
            if row.compaction is None:
                continue
            num_keys, num_kept = row.start + row.count, row.compaction.num_kept
            source = self._page_ids(row.page_table, num_keys)
            if row.counts_attention:
                sums = self._pool.read_sums(source)[..., :num_keys]
                kept = h2o_kept(sums, num_kept, is_first=not row.position_offset)
            elif needs_queries(row):
                kept = snapkv_kept(torch.stack(self._observations.pop(row.slot).scores), num_keys, num_kept)
            else:
                kept = streaming_llm_kept(num_keys, num_kept, NUM_SINKS, self._pool.pages.device).view(1, 1, -1)
            target = self._page_ids(row.compaction.pages, num_kept)
            self._pool.compact(kept, source, target)
            self._bound(target[: num_kept // self._pool.spec.page_size])

    def _bound(self, pages: Tensor) -> None:
        """Makes the bounds of complete pages [pages] int64 anew, in which each KV head has keys of its own now."""
        if self._pool.bounds is None:
            return
        for layer in range(self._pool.spec.num_layers):
            if (bounds := self._pool.bounds.of_layer(layer)) is not None:
                bounds[pages] = key_bounds(self._pool.pages[pages, layer, 0])

    def _page_ids(self, page_table: Sequence[int], num_tokens: int) -> Tensor:
        num_pages = -(-num_tokens // self._pool.spec.page_size)
        return to_device(torch.tensor(page_table[:num_pages], dtype=torch.int64).numpy(), self._pool.pages.device)


class ObservingAttention:
    """An `AttentionPass` that also scores the cached tokens of some rows by their last queries."""

    def __init__(self, inner: AttentionPass, pool: KVPool, observations: Sequence[Observation]) -> None:
        self.logits_indices, self.positions = inner.logits_indices, inner.positions
        self._inner, self._pool, self._observations = inner, pool, observations
        self._rotations: dict[tuple[Rotary, int], tuple[Tensor, Tensor]] = {}

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Attends by the inner pass, then scores the keys, those of this pass included."""
        assert isinstance(layer, Attention), "eviction_limits admits no other"
        width = layer.num_heads * layer.head_dim
        copies = [qkv[observation.tokens, :width].clone() for observation in self._observations]  # before the rotation
        mixed = self._inner.attend(qkv, layer)
        for number, (observation, queries) in enumerate(zip(self._observations, copies, strict=True)):
            q = self._rotated(queries.view(-1, layer.num_heads, layer.head_dim), layer, number)
            keys = self._pool.read_keys(layer.layer, observation.pages)[: observation.num_keys]
            if observation.counts_attention:
                sums = attention_sums(q, keys, layer.scale)
                self._pool.add_sums(layer.layer, observation.pages, sums, observation.num_keys - len(q))
            else:
                observation.scores.append(snapkv_scores(q, keys, layer.scale, observation.kernel))
        return mixed

    def _rotated(self, q: Tensor, layer: Attention, number: int) -> Tensor:
        """Normalises and rotates queries [tokens, heads, head_dim] in place, as the backend does."""
        if layer.qk_norm_weight is not None and layer.q_norm is not None:
            rms_norm(q, layer.qk_norm_weight[: layer.num_heads], layer.q_norm.eps, out=q)
        assert layer.rotary is not None, "finish_loading comes before the first pass"
        if layer.rope.type != "none":
            if (layer.rotary, number) not in self._rotations:
                positions = self.positions[self._observations[number].tokens]
                self._rotations[layer.rotary, number] = layer.rotary.lookup(positions)
            rotate_(q, *self._rotations[layer.rotary, number])
        return q


def needs_queries(row: Row) -> bool:
    """True if what this or a later compaction of a row's sequence keeps depends on the row's queries."""
    return row.counts_attention or (row.compaction is not None and row.compaction.policy in SNAPKV_KERNELS)
