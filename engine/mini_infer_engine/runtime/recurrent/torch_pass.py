"""Computes recurrent layers of a pass in plain torch, for any device, over the slots of a `StatePool`.

Rows of one token are updated together. Longer rows are scanned one by one, in a segment for each checkpoint within
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.core.batch import Row
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.gated_delta_net import GatedDeltaNet
from mini_infer_engine.layers.mamba2 import Mamba2
from mini_infer_engine.layers.recurrent import RecurrentBlock
from mini_infer_engine.layers.short_convolution import ShortConvolution
from mini_infer_engine.ops.base import AttentionPass
from mini_infer_engine.ops.recurrence.convolution import convolve_scan, convolve_step
from mini_infer_engine.ops.recurrence.gated_delta_rule import GATED_DELTA_RULE
from mini_infer_engine.ops.recurrence.rule import LinearRule, Rule
from mini_infer_engine.ops.recurrence.state_space import STATE_SPACE_RULE
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.recurrent.pass_rows import PassRows, StateStep


@dataclass(frozen=True, slots=True)
class _Steps:
    """The rows of one token."""

    tokens: Tensor  # [rows] int64, their places in the pass
    sources: Tensor  # [rows] int64, their slots before it; any slot for those that begin their sequence
    is_first: Tensor | None  # [rows] bool; None: none of them begins its sequence
    targets: Tensor  # [rows] int64, their slots after it
    checkpoint_rows: Tensor  # [checkpoints] int64, rows whose states are also copied
    checkpoints: Tensor  # [checkpoints] int64, to these slots


class TorchRecurrentPass:
    """An `ops.base.RecurrentPass` that attends by another pass."""

    def __init__(self, attention: AttentionPass, pool: StatePool, rows: Sequence[Row], device: torch.device) -> None:
        self._attention, self._pool = attention, pool
        self.logits_indices, self.positions = attention.logits_indices, attention.positions
        found = PassRows.of(rows, pool)
        self._segments = found.segments
        self._steps = _steps(found.steps, device) if found.steps else None

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Attends by the pass over keys and values."""
        return self._attention.attend(qkv, layer)

    def gated_delta_net(self, projected: tuple[Tensor, Tensor], block: GatedDeltaNet) -> Tensor:
        """Convolves queries, keys and values, applies the gated delta rule, and normalises and gates its output."""
        (qkv, gates), (strengths, decays) = block.split(projected)
        spec, tokens = block.local, len(qkv)
        qkv = functional.silu(self._convolve(qkv, block))
        q, k, v = torch.split(qkv, [spec.key_width, spec.key_width, spec.value_width], dim=1)
        log_decay = -block.A_log.exp() * functional.softplus(decays.float() + block.dt_bias)
        inputs = (
            q.reshape(tokens, -1, spec.key_dim),
            k.reshape(tokens, -1, spec.key_dim),
            v.reshape(tokens, -1, spec.value_dim),
            log_decay,
            strengths.sigmoid(),
        )
        out = self._scan(GATED_DELTA_RULE, inputs, block)
        normed: Tensor = block.norm(out, gates.reshape(out.shape))
        return normed.flatten(1)

    def mamba2(self, projected: Tensor, block: Mamba2) -> Tensor:
        """Convolves inputs, B and C, follows the state space, and gates and normalises its output."""
        spec = block.local
        gates, mixed, steps = torch.split(projected, block.widths, dim=1)
        mixed = functional.silu(self._convolve(mixed, block))
        x, b, c = torch.split(mixed, [spec.width, spec.group_width, spec.group_width], dim=1)
        x = x.float().reshape(-1, spec.num_heads, spec.head_dim)
        b, c = (vectors.reshape(-1, spec.num_groups, spec.state_size) for vectors in (b, c))
        steps = functional.softplus(steps.float() + block.dt_bias).clamp(*spec.time_step_limits)
        inputs = (c, b, x * steps.unsqueeze(-1), -block.A_log.exp() * steps)
        out = self._scan(STATE_SPACE_RULE, inputs, block) + block.D.unsqueeze(-1) * x
        return block.norm.gated(out.flatten(1), gates)

    def short_convolution(self, projected: Tensor, block: ShortConvolution) -> Tensor:
        """Gates the input, convolves it, and gates the output."""
        before, after, x = projected.chunk(3, dim=1)
        return after * self._convolve(before * x, block)

    def _convolve(self, x: Tensor, block: RecurrentBlock) -> Tensor:
        """Returns the causal convolution of the block over x [tokens, channels], by sequence."""
        return self._follow(_Convolution(block.conv1d.weight, block.conv1d.bias), (x,), self._pool.convolutions, block)

    def _scan(self, rule: LinearRule, inputs: tuple[Tensor, ...], block: RecurrentBlock) -> Tensor:
        """Returns the outputs of the block's recurrence for its inputs [tokens, ...], by sequence."""
        return self._follow(rule, inputs, self._pool.states, block)

    def _follow(self, rule: Rule, inputs: tuple[Tensor, ...], memory: Tensor, layer: RecurrentBlock) -> Tensor:
        """Computes all rows from the states in `memory` [slots, layers, ...] on, and stores those after them."""
        states = memory[:, layer.layer]
        parts: list[tuple[slice | Tensor, Tensor]] = []
        if self._steps is not None:
            parts.append((self._steps.tokens, _step(rule, inputs, states, self._steps, whole=not self._segments)))
        for segment in self._segments:
            before = torch.zeros_like(states[0]) if segment.source is None else states[segment.source]
            out, after = rule.scan(before, *(x[segment.tokens] for x in inputs))
            for target in segment.targets:
                states[target].copy_(after)
            parts.append((segment.tokens, out))
        if len(parts) == 1:
            return parts[0][1]
        outputs = parts[0][1].new_empty((len(inputs[0]), *parts[0][1].shape[1:]))
        for tokens, out in parts:
            outputs[tokens] = out
        return outputs


@dataclass(frozen=True, slots=True)
class _Convolution:
    """The `Rule` of a causal convolution."""

    weight: Tensor
    bias: Tensor | None

    def scan(self, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = inputs
        return convolve_scan(state, x, self.weight, self.bias)

    def step(self, states: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = inputs
        return convolve_step(states, x, self.weight, self.bias)


def _step(rule: Rule, inputs: tuple[Tensor, ...], states: Tensor, steps: _Steps, *, whole: bool) -> Tensor:
    """Computes the rows of one token. With `whole` they are all rows of the pass, in order."""
    before = states.index_select(0, steps.sources)
    if steps.is_first is not None:
        before[steps.is_first] = 0
    out, after = rule.step(before, *(inputs if whole else (x.index_select(0, steps.tokens) for x in inputs)))
    states.index_copy_(0, steps.targets, after)
    if len(steps.checkpoints):
        states.index_copy_(0, steps.checkpoints, after.index_select(0, steps.checkpoint_rows))
    return out


def _steps(steps: Sequence[StateStep], device: torch.device) -> _Steps:
    """Returns rows of one token as tensors."""
    is_first = [step.source is None for step in steps]
    copies = [(place, step.checkpoint) for place, step in enumerate(steps) if step.checkpoint is not None]

    def indexes(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return _Steps(
        tokens=indexes([step.token for step in steps]),
        sources=indexes([step.target if step.source is None else step.source for step in steps]),
        is_first=torch.tensor(is_first, device=device) if any(is_first) else None,
        targets=indexes([step.target for step in steps]),
        checkpoint_rows=indexes([place for place, _ in copies]),
        checkpoints=indexes([slot for _, slot in copies]),
    )
