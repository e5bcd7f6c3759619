"""Defines decoders with mixtures of experts in all or some layers: the base of Mixtral, Qwen3-MoE and DeepSeek."""

from dataclasses import dataclass, replace

from torch import nn

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.mlp import GatedMLP
from mini_infer_engine.layers.moe import MoESpec, SparseMoE
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.models.causal_model import StoredWeights
from mini_infer_engine.models.decoder import LAYER_NAME, DecoderLayer, DecoderModel
from mini_infer_engine.ops.base import Ops, ResidualState


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(ModelConfig):
    """The config of a decoder with mixtures of experts."""

    moe: MoESpec
    sparse_layers: frozenset[int]
    """Layers with a mixture; the others have a plain MLP."""


def experts_per_token(fields: Fields, default: int, num_experts: int, named: str) -> int:
    """Returns the number of experts that compute each token. Raises ModelError if there are fewer experts, whose number
    is the field `named`.
    """
    top_k = fields.size("num_experts_per_tok", default)
    if top_k > num_experts:
        raise fields.refuse("num_experts_per_tok", f"must be at most {named} = {num_experts}.")
    return top_k


def predicts_further(config: ModelConfig, checkpoint_name: str) -> bool:
    """Returns True for tensors of layers behind the last one, which predict several tokens at once."""
    found = LAYER_NAME.match(checkpoint_name)
    return found is not None and int(found[1]) >= config.num_layers


def with_split_experts(config: SparseConfig) -> ModelConfig:
    """Returns the config of what ranks share beside experts: without the width of plain MLPs if no layer has one.

    Raises ModelError if the ranks cannot share the experts.
    """
    parallel, moe = config.tensor_parallel, config.moe
    shares = {"the experts' intermediate size": moe.intermediate_size}
    if parallel.whole_experts:
        shares = {
            "enable_expert_parallel: the number of experts": moe.num_experts,
            "enable_expert_parallel: the shared experts' intermediate size": moe.shared_size,
        }
    shares["shared_expert_intermediate_size"] = moe.gated_shared_size
    obstacles = [parallel.obstacle(name, value) for name, value in shares.items()] if config.sparse_layers else []
    for obstacle in filter(None, obstacles):
        raise ModelError(f"{config.architecture}: {obstacle}.")
    if len(config.sparse_layers) < config.num_layers:
        return config
    return replace(config, intermediate_size=parallel.size)


class SparseLayer(DecoderLayer):
    """Llama's layer, with a mixture where the config has one."""

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """Returns a mixture for sparse layers, and a plain MLP for others."""
        if isinstance(config, SparseConfig) and layer in config.sparse_layers:
            return SparseMoE(config.moe, config.tensor_parallel)
        return GatedMLP(config)

    def feed_forward(self, ops: Ops, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """Returns the residual state after the mixture or the MLP."""
        if isinstance(self.mlp, SparseMoE):
            return ops.moe_add_norm(state, self.post_attention_layernorm, self.mlp, next_norm)
        return super().feed_forward(ops, state, next_norm)


def find_stacks(model: nn.Module, checkpoint: StoredWeights) -> None:
    """Finds out if the experts of a checkpoint are stored as stacks, as in Qwen3.5's files and transposed in those of
    Qwen3-VL, or one by one.
    """
    stacks = {
        name: tensor.shape for name, tensor in checkpoint.tensors.items() if name.endswith(".experts.gate_up_proj")
    }
    for module in model.modules():
        if isinstance(module, SparseMoE) and stacks:
            transposed = (module.spec.hidden_size, 2 * module.spec.intermediate_size)
            module.reads_stacks = True
            module.transposes_stacks = any(tuple(shape[1:]) == transposed for shape in stacks.values())


class SparseModel(DecoderModel):
    """A decoder with mixtures of experts."""

    @classmethod
    def check_split(cls, config: ModelConfig) -> None:
        """Raises ModelError if the ranks cannot share the experts, or the plain MLPs where there are any."""
        assert isinstance(config, SparseConfig)
        super().check_split(with_split_experts(config))

    @classmethod
    def layer_weights(cls, config: ModelConfig) -> int:
        """Returns the approximate number of weights in a layer with a mixture."""
        assert isinstance(config, SparseConfig)
        moe = config.moe
        return super().layer_weights(replace(config, intermediate_size=moe.num_stacked * moe.intermediate_size))
