"""Defines Granite 4 (hybrid): Granite's multipliers, Mamba-2 blocks in most layers, and experts in larger models."""

from typing import ClassVar

from torch import Tensor, nn

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_decoder
from mini_infer_engine.config.model.recurrence import Mamba2Spec, Mixer, mixers_by_layer, time_step_limits
from mini_infer_engine.config.model.rope import NO_ROTATION, parse_rope
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.layers.mlp import FusedGatedMLP
from mini_infer_engine.layers.moe import ExpertLayers, MoESpec, SparseMoE
from mini_infer_engine.layers.placement import Placement
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.granite import granite_fields, scaled_to_residual
from mini_infer_engine.models.mamba2_layer import Mamba2Layer
from mini_infer_engine.models.recurrent_decoder import HybridModel
from mini_infer_engine.models.sparse_decoder import SparseConfig, SparseLayer, experts_per_token

_KINDS: dict[str, Mixer] = {
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
}


class _FusedExperts(SparseMoE):
    """Experts whose checkpoint has the stacks themselves, and one MLP that computes every token."""

    stores_stacks: ClassVar[bool] = True

    def __init__(self, spec: MoESpec, parallel: TensorParallel, shared: ExpertLayers) -> None:
        super().__init__(spec, parallel)
        self.shared_experts = shared

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps the two stacks."""
        return self.stack_placements(f"{path}.input_linear.weight", f"{path}.output_linear.weight")


class GraniteHybridLayer(SparseLayer):
    """A layer with attention, whose checkpoint has gate and up in one tensor."""

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """Returns the feed-forward block, with or without experts."""
        return _feed_forward(config)


class GraniteMambaLayer(Mamba2Layer, SparseLayer):
    """A layer with a Mamba-2 block, whose checkpoint has gate and up in one tensor."""

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """Returns the feed-forward block, with or without experts."""
        return _feed_forward(config)


def _feed_forward(config: ModelConfig) -> nn.Module:
    mlp = FusedGatedMLP(config)
    if not isinstance(config, SparseConfig):
        return mlp
    parallel = config.tensor_parallel
    shared = ExpertLayers(config.hidden_size, parallel.even(config.intermediate_size), is_summed=parallel.size > 1)
    shared.gate_up_proj = mlp.gate_up_proj
    return _FusedExperts(config.moe, parallel, shared)


class GraniteMoeHybridForCausalLM(HybridModel):
    """Granite 4, whose layers of attention have no positions unless the config has them rotate."""

    layer_class: ClassVar[type[DecoderLayer]] = GraniteHybridLayer
    recurrent_layer_class: ClassVar[type[DecoderLayer]] = GraniteMambaLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".recurrence.": ".mamba.",
        ".mlp.shared_experts.gate_up_proj.": ".shared_mlp.input_linear.",
        ".mlp.shared_experts.down_proj.": ".shared_mlp.output_linear.",
        ".mlp.gate_up_proj.": ".shared_mlp.input_linear.",
        ".mlp.down_proj.": ".shared_mlp.output_linear.",
        ".mlp.gate.": ".block_sparse_moe.router.layer.",
        ".mlp.": ".block_sparse_moe.",
    }

    @classmethod
    def check_split(cls, config: ModelConfig) -> None:
        """Raises ModelError if the ranks cannot share the model; its MLP computes every token beside experts, too."""
        if (
            obstacle := config.tensor_parallel.obstacle("shared_intermediate_size", config.intermediate_size)
        ) is not None:
            raise ModelError(f"{config.architecture}: {obstacle}.")
        super().check_split(config)

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults, and Granite's multipliers as its dense models do."""
        num_layers, longest = fields.size("num_hidden_layers"), fields.size("max_position_embeddings", 2048)
        rotation = fields.values.get("position_embedding_type")
        if rotation not in (None, "rope", "nope"):
            raise fields.refuse("position_embedding_type", "only rope, nope and null are supported.")
        named = "layer_types" if fields.values.get("layer_types") is not None else "layers_block_type"
        fields = Fields(fields.path, {**fields.values, "layer_types": fields.values.get(named)})
        different = granite_fields(fields) | {
            "intermediate_size": fields.size("shared_intermediate_size", 1024),
            "ropes": (parse_rope(fields, longest) if rotation == "rope" else NO_ROTATION,) * num_layers,
            "mixers": mixers_by_layer(fields, num_layers, _KINDS, ["mamba"] * num_layers),
        }
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        common["recurrence"] = _mamba(fields, common["rms_norm_eps"])
        common = scaled_to_residual(fields, common)
        if fields.optional_integer("num_local_experts") == 0:
            return ModelConfig(**common)
        num_experts = fields.size("num_local_experts", 8)
        top_k = experts_per_token(fields, 2, num_experts, "num_local_experts")
        moe = MoESpec(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_experts=num_experts,
            top_k=top_k,
            normalizes_top_k=True,  # a softmax over the chosen experts' logits
        )
        return SparseConfig(**common, moe=moe, sparse_layers=frozenset(range(num_layers)))

    def scale_embeddings(self, hidden: Tensor) -> Tensor:
        """Multiplies by the embedding scale, which is not rounded to the model's dtype as Gemma's is."""
        return hidden.mul_(self.config.embedding_scale)


def _mamba(fields: Fields, eps: float) -> Mamba2Spec:
    num_heads, width = fields.size("mamba_n_heads", 128), fields.size("mamba_expand", 2) * fields.size("hidden_size")
    head_dim = fields.values.get("mamba_d_head", "auto")
    head_dim = width // num_heads if head_dim in (None, "auto") else fields.size("mamba_d_head")
    if head_dim * num_heads != width:
        raise fields.refuse("mamba_n_heads", f"times mamba_d_head = {head_dim} must be mamba_expand * hidden_size.")
    num_groups = fields.size("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise fields.refuse("mamba_n_groups", f"must divide mamba_n_heads = {num_heads}.")
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.size("mamba_d_state", 256),
        num_groups=num_groups,
        kernel_size=fields.size("mamba_d_conv", 4),
        norm_eps=eps,
        norm_groups=1,
        time_step_limits=time_step_limits(fields),
        convolution_bias=fields.boolean("mamba_conv_bias", True),
        projection_bias=fields.boolean("mamba_proj_bias", False),
    )
