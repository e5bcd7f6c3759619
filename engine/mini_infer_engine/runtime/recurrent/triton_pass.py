"""Computes recurrent layers of a pass by our kernels, over the slots of a `StatePool`, without CUDA graphs."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.recurrence.causal_convolution import ConvolutionRows, causal_convolution
from mini_infer_engine.kernels.recurrence.scan_chunks import scan_chunks
from mini_infer_engine.kernels.recurrence.update_states import update_states
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.recurrent import RecurrentBlock
from mini_infer_engine.ops.base import AttentionPass
from mini_infer_engine.ops.recurrence.rule import LinearRule
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.recurrent.pass_rows import PassRows, source_slot

_NONE = -1
"""Stands for no slot in what kernels read."""


class TritonRecurrentPass:
    """An `ops.base.RecurrentPass` that attends by another pass.

    Rows of one token are updated together, in place. Longer rows are scanned one by one, in a segment for each
    checkpoint within them.
    """

    def __init__(self, attention: AttentionPass, pool: StatePool, rows: Sequence[Row], device: torch.device) -> None:
        self._attention, self._pool = attention, pool
        self.logits_indices, self.positions = attention.logits_indices, attention.positions
        found = PassRows.of(rows, pool)
        self._convolution = _convolution_rows(rows, pool, device)
        self._segments = [segment.tokens for segment in found.segments]
        slots = [(_slot(segment.source), *segment.targets, _NONE, _NONE)[:4] for segment in found.segments]
        self._segment_slots = list(_table(slots, device))
        steps = [(step.token, _slot(step.source), step.target, _slot(step.checkpoint)) for step in found.steps]
        self._steps = _table(steps, device)

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Attends by the pass over keys and values."""
        return self._attention.attend(qkv, layer)

    def convolve(self, x: Tensor, layer: RecurrentBlock) -> Tensor:
        """Returns the causal convolution of the layer over x [tokens, channels], by sequence."""
        states = self._pool.convolutions[:, layer.layer]
        return causal_convolution(x, layer.conv1d.weight, layer.conv1d.bias, states, self._convolution)

    def scan(self, rule: LinearRule, inputs: tuple[Tensor, ...], layer: RecurrentBlock) -> Tensor:
        """Returns the outputs of the layer's recurrence for its inputs [tokens, ...], by sequence."""
        states, prepared = self._pool.states[:, layer.layer], rule.prepare(*inputs)
        out = torch.empty(prepared.v.shape, dtype=inputs[2].dtype, device=prepared.v.device)
        if len(self._steps):
            parts = prepared.q, prepared.k, prepared.v, prepared.log_decay, prepared.strength
            update_states(*parts, states, self._steps, out)
        for tokens, slots in zip(self._segments, self._segment_slots, strict=True):
            found = rule.in_chunks(prepared.of(tokens))
            chunks, corrections = found.chunks, found.corrections
            scan_chunks(
                chunks.queries,
                chunks.within,
                chunks.keys,
                chunks.kept,
                found.values.contiguous(),
                None if corrections is None else corrections.contiguous(),
                states,
                slots,
                out[tokens],
            )
        return out


def _slot(slot: int | None) -> int:
    return _NONE if slot is None else slot


def _convolution_rows(rows: Sequence[Row], pool: StatePool, device: torch.device) -> ConvolutionRows:
    """Returns the rows of a pass for the convolution, which needs no segments: tokens before a checkpoint are there."""
    lines: list[tuple[int, int, int, int]] = []
    stores: list[tuple[int, int]] = []
    begin = 0
    for row in rows:
        places = [(count, pool.checkpoint_slot(checkpoint)) for count, checkpoint in row.checkpoints]
        places.append((row.count, row.slot))
        lines.append((begin, _slot(source_slot(row, pool)), len(stores), len(places)))
        stores += places
        begin += row.count
    row_of_token = np.repeat(np.arange(len(rows), dtype=np.int32), [row.count for row in rows])
    return ConvolutionRows(_table(lines, device), _table(stores, device), to_device(row_of_token, device))


def _table(lines: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Returns lines of equally many numbers as int32 on the device."""
    return to_device(np.array(lines, dtype=np.int32), device)
