"""Defines a decoder layer with a Mamba-2 block, which several hybrids share."""

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.recurrence import Mamba2Spec
from mini_infer_engine.layers.mamba2 import Mamba2
from mini_infer_engine.layers.recurrent import RecurrentBlock
from mini_infer_engine.models.recurrent_decoder import RecurrentLayer
from mini_infer_engine.ops.base import RecurrentPass
from mini_infer_engine.ops.recurrence.state_space import STATE_SPACE_RULE


class Mamba2Layer(RecurrentLayer):
    """A layer with a Mamba-2 block in the place of attention."""

    def make_recurrence(self, config: ModelConfig, layer: int) -> RecurrentBlock:
        """Returns the Mamba-2 block of this layer."""
        assert isinstance(config.recurrence, Mamba2Spec)
        return Mamba2(config, layer, config.recurrence)

    def recur(self, projected: Tensor, recurrent: RecurrentPass) -> Tensor:
        """Convolves inputs, B and C, follows the state space, and gates and normalises its output."""
        block = self.recurrence
        assert isinstance(block, Mamba2)
        spec = block.spec
        gates, mixed, steps = torch.split(projected, block.widths, dim=1)
        mixed = functional.silu(recurrent.convolve(mixed, block))
        x, b, c = torch.split(mixed, [spec.width, spec.group_width, spec.group_width], dim=1)
        x = x.float().reshape(-1, spec.num_heads, spec.head_dim)
        b, c = (vectors.reshape(-1, spec.num_groups, spec.state_size) for vectors in (b, c))
        steps = functional.softplus(steps.float() + block.dt_bias).clamp(*spec.time_step_limits)
        inputs = (c, b, x * steps.unsqueeze(-1), -block.A_log.exp() * steps)
        out = recurrent.scan(STATE_SPACE_RULE, inputs, block) + block.D.unsqueeze(-1) * x
        normed: Tensor = block.norm(out.flatten(1), gates)
        return normed
