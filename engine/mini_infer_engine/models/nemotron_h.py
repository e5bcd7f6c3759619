"""Defines Nemotron-H and Nemotron 3: layers of one block each, which is Mamba-2, attention, an MLP or a mixture."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.config.model.recurrence import Mamba2Spec, Mixer, mixers_by_layer, time_step_limits
from mini_infer_engine.config.model.rope import NO_ROTATION
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.mlp import SquaredMLP
from mini_infer_engine.layers.moe import MoESpec, SparseMoE
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.layers.placement import Part, Placement
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.deepseek_v2 import moe_spec
from mini_infer_engine.models.mamba2_layer import Mamba2Layer
from mini_infer_engine.models.recurrent_decoder import HybridModel
from mini_infer_engine.models.sparse_decoder import SparseConfig
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState

_KINDS: dict[str, Mixer] = {
    "mamba": "recurrent",
    "linear_attention": "recurrent",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "none",
    "moe": "none",
}
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The blocks by their letters in `hybrid_override_pattern`."""
_DEFAULT_LAYERS = ["mamba", "moe", "attention", "mlp"]
_DEFAULTS: dict[str, Any] = {
    "intermediate_size": 21_504,
    "max_position_embeddings": 4096,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
}
_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
_DEFAULT_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronConfig(SparseConfig):
    """A `SparseConfig` with the width of the MLP that computes every token beside the experts."""

    shared_size: int


class _MixerLayer(DecoderLayer):
    """A layer whose one block mixes tokens, after a norm."""

    def add_feed_forward(self, config: ModelConfig, layer: int) -> None:
        """Adds nothing: feed-forward blocks are layers of their own."""

    def forward(
        self, ops: Ops, state: ResidualState, attention: AttentionPass, next_norm: RMSNorm | None
    ) -> ResidualState:
        """Returns the residual state after this layer; after the last one, of tokens whose logits are requested."""
        assert next_norm is not None, "layers of this kind, and the head, begin with a norm"
        mixed, state = self.attend(ops, state, attention)
        return ops.linear_add_norm(mixed, self.mixer_out_proj, state, next_norm) if mixed.shape[0] else state

    def normed_products(self) -> list[tuple[RMSNorm, Linear]]:
        """Returns no products: they are for quantised weights, which hybrids do not support yet."""
        return []


class NemotronMambaLayer(_MixerLayer, Mamba2Layer):
    """A layer with a Mamba-2 block."""


class _FeedForwardLayer(DecoderLayer):
    """A layer whose one block computes tokens by themselves, after a norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.is_last = layer == config.num_layers - 1

    def add_mixer(self, config: ModelConfig, layer: int) -> None:
        """Adds nothing: mixers are layers of their own."""

    def add_feed_forward(self, config: ModelConfig, layer: int) -> None:
        """Adds the block."""
        self.mlp = self.make_mlp(config, layer)

    def make_mlp(self, config: ModelConfig, layer: int) -> SquaredMLP:
        """Returns an MLP."""
        del layer
        return SquaredMLP(config, config.intermediate_size)

    def forward(
        self, ops: Ops, state: ResidualState, attention: AttentionPass, next_norm: RMSNorm | None
    ) -> ResidualState:
        """Returns the residual state after this layer; after the last one, of tokens whose logits are requested."""
        assert next_norm is not None, "layers of this kind, and the head, begin with a norm"
        if self.is_last and attention.logits_indices is not None:
            state = state.select(attention.logits_indices)
        return self.feed_forward(ops, state, next_norm) if state.residual.shape[0] else state

    def feed_forward(self, ops: Ops, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """Returns the residual state after the MLP."""
        assert isinstance(self.mlp, SquaredMLP)
        return ops.linear_add_norm(self.activated(ops, state, self.mlp), self.mlp.down_proj, state, next_norm)

    def activated(self, ops: Ops, state: ResidualState, mlp: SquaredMLP) -> Tensor:
        """Returns the input of an MLP's last product."""
        return functional.relu(ops.norm_linear(state, self.input_layernorm, mlp.up_proj)).square()

    def normed_products(self) -> list[tuple[RMSNorm, Linear]]:
        """Returns no products: they are for quantised weights, which hybrids do not support yet."""
        return []


class NemotronExperts(SparseMoE):
    """Experts without gates, under the checkpoint's names."""

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps each expert's two tensors to its part of the stacks."""
        assert self.correction is not None, "this architecture's routers have one"
        tensors = {f"{path}.gate.e_score_correction_bias": Placement(self.correction)}
        rows, columns = (Part(dim, self.share) if self.is_summed else None for dim in (0, 1))
        for here, expert in enumerate(self.local_experts):
            tensors[f"{path}.experts.{expert}.up_proj.weight"] = Placement(self.gate_up_proj[here], part=rows)
            tensors[f"{path}.experts.{expert}.down_proj.weight"] = Placement(self.down_proj[here], part=columns)
        return tensors


class NemotronSparseLayer(_FeedForwardLayer):
    """A layer with a mixture of experts, and an MLP that computes every token."""

    def add_feed_forward(self, config: ModelConfig, layer: int) -> None:
        """Adds the experts and the MLP."""
        assert isinstance(config, NemotronConfig)
        self.mlp = NemotronExperts(config.moe, config.tensor_parallel)
        self.shared_experts = SquaredMLP(config, config.shared_size)

    def feed_forward(self, ops: Ops, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """Returns the residual state after both, which read the same norm."""
        assert isinstance(self.mlp, NemotronExperts)
        assert self.input_layernorm is not None
        shared = self.activated(ops, state, self.shared_experts)
        state = ops.moe_add_norm(state, self.input_layernorm, self.mlp, next_norm)
        return ops.linear_add_norm(shared, self.shared_experts.down_proj, state, next_norm)


class NemotronAttentionLayer(_MixerLayer):
    """A layer with attention, whose queries and keys are not rotated."""


class NemotronHForCausalLM(HybridModel):
    """Nemotron-H (NVIDIA 2025, arXiv 2504.03624) and Nemotron 3 (arXiv 2512.20856), without multi-token prediction."""

    layer_class: ClassVar[type[DecoderLayer]] = NemotronAttentionLayer
    recurrent_layer_class: ClassVar[type[DecoderLayer]] = NemotronMambaLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        "model.embed_tokens.": "model.embeddings.",
        "model.norm.": "model.norm_f.",
        ".input_layernorm.": ".norm.",
        ".self_attn.": ".mixer.",
        ".recurrence.": ".mixer.",
        ".mlp.latent_in_proj.": ".mixer.fc1_latent_proj.",
        ".mlp.latent_out_proj.": ".mixer.fc2_latent_proj.",
        ".mlp.": ".mixer.",
        ".shared_experts.": ".mixer.shared_experts.",
    }

    @classmethod
    def make_layer(cls, config: ModelConfig, layer: int) -> DecoderLayer:
        """Returns a layer of the kind that the config has there."""
        assert config.mixers is not None, "a hybrid's config says where attention is"
        if config.mixers[layer] != "none":
            return super().make_layer(config, layer)
        is_sparse = isinstance(config, SparseConfig) and layer in config.sparse_layers
        return (NemotronSparseLayer if is_sparse else _FeedForwardLayer)(config, layer)

    @classmethod
    def check_split(cls, config: ModelConfig) -> None:
        """Raises ModelError if the ranks cannot share the model, the MLP beside experts included."""
        if isinstance(config, NemotronConfig):
            name = "moe_shared_expert_intermediate_size"
            if (obstacle := config.tensor_parallel.obstacle(name, config.shared_size)) is not None:
                raise ModelError(f"{config.architecture}: {obstacle}.")
        super().check_split(config)

    def is_unused(self, checkpoint_name: str) -> bool:
        """True for the layers that predict several tokens, too: they are for speculation."""
        return checkpoint_name.startswith("mtp.") or super().is_unused(checkpoint_name)

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults. Time steps have the limits of `time_step_limit`, as in NVIDIA's
        own code and in vLLM; transformers has those of prompts be at least `time_step_min`.
        """
        layers = _layer_types(fields)
        eps = fields.number("layer_norm_epsilon", 1e-5)
        renamed = {new: fields.values[old] for old, new in _OLDER_NAMES.items() if old in fields.values}
        sizes = {"layer_types": layers, "num_hidden_layers": len(layers), "rms_norm_eps": eps}
        stated = {name: value for name, value in fields.values.items() if value is not None}
        fields = Fields(fields.path, _DEFAULTS | stated | renamed | sizes)
        mixers = mixers_by_layer(fields, len(layers), _KINDS, layers)
        if fields.values.get("mlp_hidden_act", "relu2") != "relu2":
            raise fields.refuse("mlp_hidden_act", "only relu2 is supported.")
        parse_activation(fields, "mamba_hidden_act")
        different = {
            "default_head_dim": _DEFAULT_HEAD_DIM,
            "mlp_bias": fields.boolean("mlp_bias", False),
            "ropes": (NO_ROTATION,) * len(layers),
            "mixers": mixers,
            "recurrence": _mamba(fields, eps),
        }
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        sparse = frozenset(layer for layer, kind in enumerate(layers) if kind == "moe")
        if not sparse:
            return ModelConfig(**common)
        shared_size = fields.size("moe_shared_expert_intermediate_size", 7688)
        return NemotronConfig(**common, moe=_experts(fields), sparse_layers=sparse, shared_size=shared_size)


def _layer_types(fields: Fields) -> list[str]:
    """Returns the kind of each layer: a list of the file's, or its pattern of letters. Their names are checked later.

    Raises ModelError if a letter of the pattern is unknown, or the list is none.
    """
    for key in ("layer_types", "layers_block_type"):
        if (named := fields.values.get(key)) is not None:
            if not isinstance(named, list) or not named:
                raise fields.refuse(key, f"must be a list of {', '.join(_KINDS)}.")
            return named
    pattern = fields.values.get("hybrid_override_pattern")
    if pattern is None:
        return _DEFAULT_LAYERS
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(_PATTERN):
        raise fields.refuse("hybrid_override_pattern", f"must be of the letters {' '.join(_PATTERN)}.")
    return [_PATTERN[letter] for letter in pattern]


def _mamba(fields: Fields, eps: float) -> Mamba2Spec:
    num_heads, num_groups = fields.size("mamba_num_heads", 128), fields.size("n_groups", 8)
    if num_heads % num_groups:
        raise fields.refuse("n_groups", f"must divide mamba_num_heads = {num_heads}.")
    return Mamba2Spec(
        num_heads=num_heads,
        head_dim=fields.size("mamba_head_dim", 64),
        state_size=fields.size("ssm_state_size", 128),
        num_groups=num_groups,
        kernel_size=fields.size("conv_kernel", 4),
        norm_eps=eps,
        norm_groups=num_groups,
        time_step_limits=time_step_limits(fields),
        convolution_bias=fields.boolean("use_conv_bias", True),
        projection_bias=fields.boolean("use_bias", False),
    )


def _experts(fields: Fields) -> MoESpec:
    """Returns the shape of the mixture. None of its experts is shared: the MLP beside them has a width of its own."""
    if fields.boolean("mlp_bias", False):
        raise fields.refuse("mlp_bias", "biases of experts are not supported.")
    normalizes = fields.boolean("norm_topk_prob", True)
    spec = moe_spec(fields, in_groups=True, normalizes=normalizes, scoring="sigmoid", has_correction=True)
    latent_size = None if fields.values.get("moe_latent_size") is None else fields.size("moe_latent_size")
    return replace(spec, num_shared=0, is_gated=False, latent_size=latent_size)
