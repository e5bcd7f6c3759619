"""Defines a decoder layer with a Mamba-2 block, which several hybrids share."""

from torch import Tensor

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.recurrence import Mamba2Spec
from mini_infer_engine.layers.mamba2 import Mamba2
from mini_infer_engine.layers.recurrent import RecurrentBlock
from mini_infer_engine.models.recurrent_decoder import RecurrentLayer
from mini_infer_engine.ops.base import Ops, RecurrentPass, ResidualState


class Mamba2Layer(RecurrentLayer):
    """A layer with a Mamba-2 block in the place of attention."""

    def make_recurrence(self, config: ModelConfig, layer: int) -> RecurrentBlock:
        """Returns the Mamba-2 block of this layer."""
        assert isinstance(config.recurrence, Mamba2Spec)
        return Mamba2(config, layer, config.recurrence)

    def mix(self, ops: Ops, state: ResidualState, recurrent: RecurrentPass) -> Tensor:
        """Projects, convolves inputs, B and C, follows the state space, and gates and normalises its output."""
        block = self.recurrence
        assert isinstance(block, Mamba2)
        out = recurrent.mamba2(ops.norm_linear(state, self.input_layernorm, block.in_proj), block)
        if block.norm.is_shared:
            ops.norm_columns_(out, slice(None), block.norm)
        return out
