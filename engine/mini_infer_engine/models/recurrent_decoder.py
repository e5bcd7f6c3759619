"""Defines decoders of which some layers have a recurrent state instead of keys and values: the base of the hybrids."""

from typing import ClassVar, cast

from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.mlp import GatedMLP
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.layers.recurrent import RecurrentBlock
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.models.sparse_decoder import SparseConfig, with_split_experts
from mini_infer_engine.ops.base import AttentionPass, Ops, RecurrentPass, ResidualState


class RecurrentLayer(DecoderLayer):
    """A decoder layer with a recurrent block in the place of attention."""

    def add_mixer(self, config: ModelConfig, layer: int) -> None:
        """Adds the recurrent block."""
        self.recurrence = self.make_recurrence(config, layer)

    def make_recurrence(self, config: ModelConfig, layer: int) -> RecurrentBlock:
        """Returns the recurrent block of this layer."""
        raise NotImplementedError

    def mix(self, ops: Ops, state: ResidualState, recurrent: RecurrentPass) -> Tensor:
        """Returns the input of `out_proj` for all tokens of the pass."""
        raise NotImplementedError

    @property
    def mixer_out_proj(self) -> Linear:
        """The product that maps the block's output to the hidden width."""
        return self.recurrence.out_proj

    def attend(self, ops: Ops, state: ResidualState, attention: AttentionPass) -> tuple[Tensor, ResidualState]:
        """Returns the block's output, and the residual state of the same tokens: fewer of them after the last layer."""
        mixed = self.mix(ops, state, cast("RecurrentPass", attention))  # the pass of a model with a state pool
        if self.recurrence.is_last and attention.logits_indices is not None:
            return mixed.index_select(0, attention.logits_indices), state.select(attention.logits_indices)
        return mixed, state

    def normed_products(self) -> list[tuple[RMSNorm, Linear]]:
        """Returns norms with the product that is the only reader of their output."""
        found = [(self.input_layernorm, self.recurrence.in_proj)]
        if isinstance(self.mlp, GatedMLP):
            found.append((self.norm_before_mlp, self.mlp.gate_up_proj))
        return [(norm, linear) for norm, linear in found if norm is not None]


class HybridModel(DecoderModel):
    """A decoder with layers of attention and layers with a recurrent state."""

    recurrent_layer_class: ClassVar[type[DecoderLayer]]

    @classmethod
    def make_layer(cls, config: ModelConfig, layer: int) -> DecoderLayer:
        """Returns a layer with the mixer that the config has there."""
        assert config.mixers is not None, "a hybrid's config says where attention is"
        kind = cls.recurrent_layer_class if config.mixers[layer] == "recurrent" else cls.layer_class
        return kind(config, layer)

    @classmethod
    def check_split(cls, config: ModelConfig) -> None:
        """Raises ModelError if the ranks cannot share the recurrent blocks, or what other decoders have."""
        assert config.recurrence is not None, "a hybrid's config describes its recurrent blocks"
        if (obstacle := config.recurrence.obstacle(config.tensor_parallel)) is not None:
            raise ModelError(f"{config.architecture}: {obstacle}.")
        super().check_split(with_split_experts(config) if isinstance(config, SparseConfig) else config)

    @property
    def attention_layers(self) -> list[AttentionBlock]:
        """The attention blocks, in order, of the layers that have one."""
        layers = zip(self.config.layers, self.layers, strict=True)
        return [layer.self_attn for number, layer in layers if number in self.config.attention_layers]
