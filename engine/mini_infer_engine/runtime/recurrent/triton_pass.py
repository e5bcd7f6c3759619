"""Computes recurrent layers of a pass by our kernels, over the slots of a `StatePool`."""

import torch
from torch import Tensor

from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.norm.gated_rms_norm import gated_rms_norm
from mini_infer_engine.kernels.recurrence.causal_convolution import Epilogue, causal_convolution
from mini_infer_engine.kernels.recurrence.chunk_outputs import state_space_outputs
from mini_infer_engine.kernels.recurrence.chunk_states import chunk_states
from mini_infer_engine.kernels.recurrence.gated_delta_config import scan_config, step_config
from mini_infer_engine.kernels.recurrence.gated_delta_prepare import prepare_gated_delta
from mini_infer_engine.kernels.recurrence.gated_delta_scan import gated_delta_scan
from mini_infer_engine.kernels.recurrence.gated_delta_step import gated_delta_step
from mini_infer_engine.kernels.recurrence.pass_tables import PassTables
from mini_infer_engine.kernels.recurrence.prepare_chunks import prepare_state_space
from mini_infer_engine.kernels.recurrence.state_space_step import state_space_step
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.gated_delta_net import GatedDeltaNet
from mini_infer_engine.layers.mamba2 import Mamba2
from mini_infer_engine.layers.recurrent import RecurrentBlock
from mini_infer_engine.layers.short_convolution import ShortConvolution
from mini_infer_engine.ops.base import AttentionPass
from mini_infer_engine.runtime.memory.state_pool import StatePool


class TritonRecurrentPass:
    """An `ops.base.RecurrentPass` that attends by another pass.

    Rows of one token are updated together, in place; longer ones are cut into chunks, at checkpoints too.
    """

    def __init__(self, attention: AttentionPass, pool: StatePool, tables: PassTables, kernels: KernelContext) -> None:
        self._attention, self._pool, self._tables, self._kernels = attention, pool, tables, kernels
        self.logits_indices, self.positions = attention.logits_indices, attention.positions

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Attends by the pass over keys and values."""
        return self._attention.attend(qkv, layer)

    def gated_delta_net(self, projected: tuple[Tensor, Tensor], block: GatedDeltaNet) -> Tensor:
        """Computes the steps in two kernels, and the chunks in five."""
        (qkv, gates), (strengths, decays) = block.split(projected)
        mixed, tables, spec = self._convolve(qkv, block, "silu"), self._tables, block.local
        states, norm = self._pool.states[:, block.layer], block.norm
        out = tables.outputs(len(qkv), spec.value_width, qkv)
        weights = strengths, decays, block.A_log, block.dt_bias
        if len(tables.steps):
            config = step_config(len(tables.steps), spec.num_value_heads, pdl=self._kernels.policy.pdl)
            launch = config, self._kernels.workspace
            gated_delta_step(mixed, gates, *weights, norm.weight, norm.eps, states, tables, out, *launch)
        if len(tables.rows):
            q, k, _ = torch.split(mixed, [spec.key_width, spec.key_width, spec.value_width], dim=1)
            prepared = prepare_gated_delta(mixed, *weights, spec.key_dim, spec.value_dim, tables)
            config_of_scan = scan_config(mixed.dtype)
            gated_delta_scan(q, k, prepared, gates, norm.weight, norm.eps, states, tables, out, config_of_scan)
        return out

    def mamba2(self, projected: Tensor, block: Mamba2) -> Tensor:
        """Computes the steps in three kernels, and the chunks in six."""
        gates, mixed, time_steps = torch.split(projected, block.widths, dim=1)
        mixed, tables, spec = self._convolve(mixed, block, "silu"), self._tables, block.local
        states = self._pool.states[:, block.layer]
        out = tables.outputs(len(gates), spec.width, gates)
        limits = spec.time_step_limits
        if len(tables.steps):
            state_space_step(mixed, time_steps, block.A_log, block.D, block.dt_bias, limits, states, tables, out)
        if len(tables.rows):
            x, b, c = torch.split(mixed, [spec.width, spec.group_width, spec.group_width], dim=1)
            factors, totals = prepare_state_space(time_steps, block.A_log, block.dt_bias, limits, tables)
            before = chunk_states(b, x, factors, totals, states, tables)
            state_space_outputs(c, b, x, factors, totals, before, block.D, tables, out)
        if block.norm.is_shared:
            return block.norm.gated(out.float(), gates)
        return gated_rms_norm(out, gates, block.norm.weight, block.norm.num_groups, block.norm.eps)

    def short_convolution(self, projected: Tensor, block: ShortConvolution) -> Tensor:
        """Gates the input, convolves it and gates the output in the kernels of the convolution."""
        return self._convolve(projected, block, "gates")

    def _convolve(self, x: Tensor, block: RecurrentBlock, epilogue: Epilogue) -> Tensor:
        states = self._pool.convolutions[:, block.layer]
        return causal_convolution(x, block.conv1d.weight, block.conv1d.bias, states, self._tables, epilogue)
