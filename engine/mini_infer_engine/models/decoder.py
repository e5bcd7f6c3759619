"""Defines the decoder-only transformer that the supported architectures share; their files state the differences.

Its forward pass exists once, in the operations of `ops`: torch runs the same lines on a CPU, our kernels on a GPU. It
computes a flat list of tokens; only the attention pass knows which token belongs to which sequence.
"""

import re
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.rope import RopeParameters
from mini_infer_engine.config.quantization.checkpoint import KV_SCALES, unused_suffixes
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.linear import Linear, LinearMethod
from mini_infer_engine.layers.mlp import GatedMLP
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.layers.placement import Placement
from mini_infer_engine.layers.recurrent import CausalConvolution, RecurrentBlock
from mini_infer_engine.layers.rotary import Rotary
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.hidden_taps import HiddenTaps
from mini_infer_engine.models.mtp_names import MtpNames
from mini_infer_engine.models.vision.deepstack import DeepstackFeatures
from mini_infer_engine.models.vision.registry import make_vision_encoder
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState

_WITH_PLACEMENTS = (Linear, SparseMoE, Embedding, RMSNorm, Attention, CausalConvolution, RecurrentBlock)
"""Modules that map the checkpoint's tensors to their parameters; those of others are as they are stored."""
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")
"""The beginning of a checkpoint's name of a tensor in a layer."""
_EXPERT_NAME = re.compile(r"\.experts\.(\d+)\.")


class DecoderLayer(nn.Module):
    """A decoder layer: attention and MLP, each after a norm and added to the residual stream."""

    has_qk_norm: ClassVar[bool] = False
    """True if each head of q and k is normalised by itself."""
    has_input_norm: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm.of(config) if self.has_input_norm else None
        self.add_mixer(config, layer)
        self.add_feed_forward(config, layer)

    def add_mixer(self, config: ModelConfig, layer: int) -> None:
        """Adds the block that mixes tokens."""
        self.self_attn = self.make_attention(config, layer)

    def add_feed_forward(self, config: ModelConfig, layer: int) -> None:
        """Adds the norm after the mixer and the feed-forward block."""
        self.post_attention_layernorm = RMSNorm.of(config)
        self.mlp: nn.Module = self.make_mlp(config, layer)

    @property
    def mixer_out_proj(self) -> Linear:
        """The product that maps the output of `attend` to the hidden width."""
        return self.self_attn.o_proj

    def make_attention(self, config: ModelConfig, layer: int) -> AttentionBlock:
        """Returns the attention block of this layer."""
        return Attention(config, layer, has_qk_norm=self.has_qk_norm)

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """Returns the feed-forward block of this layer."""
        del layer  # other architectures have blocks of several kinds
        return GatedMLP(config)

    def forward(
        self, ops: Ops, state: ResidualState, attention: AttentionPass, next_norm: RMSNorm | None
    ) -> ResidualState:
        """Returns the residual state after this layer; after the last one, of tokens whose logits are requested."""
        assert next_norm is not None, "layers of this kind, and the head, begin with a norm"
        mixed, state = self.attend(ops, state, attention)
        if not mixed.shape[0]:
            return state  # no logits are asked for: keys and values are all that this pass is for
        state = ops.linear_add_norm(mixed, self.mixer_out_proj, state, self.post_attention_layernorm)
        return self.feed_forward(ops, state, next_norm)

    def attend(self, ops: Ops, state: ResidualState, attention: AttentionPass) -> tuple[Tensor, ResidualState]:
        """Returns attention's output, and the residual state of the same tokens: fewer of them after the last layer."""
        mixed = attention.attend(self.project(ops, state), self.self_attn)
        if self.self_attn.is_last and attention.logits_indices is not None:
            state = state.select(attention.logits_indices)
        return mixed, state

    def project(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns the input of `AttentionPass.attend` for all tokens: q, k and v side by side."""
        assert isinstance(self.self_attn, Attention), "layers with other attention project in a way of their own"
        return ops.norm_linear(state, self.input_layernorm, self.self_attn.qkv_proj)

    @property
    def norm_before_mlp(self) -> RMSNorm | None:
        """The norm before the MLP, or None if the MLP reads the residual stream itself."""
        return self.post_attention_layernorm

    def normed_products(self) -> list[tuple[RMSNorm, Linear]]:
        """Returns norms with the product that is the only reader of their output."""
        found: list[tuple[RMSNorm | None, Linear]] = []
        if isinstance(self.self_attn, Attention):
            found.append((self.input_layernorm, self.self_attn.qkv_proj))
        if isinstance(self.mlp, GatedMLP):
            found.append((self.norm_before_mlp, self.mlp.gate_up_proj))
        return [(norm, linear) for norm, linear in found if norm is not None]

    def feed_forward(self, ops: Ops, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """Returns the residual state after the MLP."""
        assert isinstance(self.mlp, GatedMLP)
        gated = ops.norm_gated_linear(state, self.post_attention_layernorm, self.mlp.gate_up_proj, self.mlp.activation)
        return ops.linear_add_norm(gated, self.mlp.down_proj, state, next_norm)


class OutputNormLayer(DecoderLayer):
    """A decoder layer that also normalises the outputs of attention and MLP before they are added to the residual."""

    has_feedforward_norm: ClassVar[bool] = True
    """True if there is one more norm, before the MLP."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.pre_feedforward_layernorm = RMSNorm.of(config) if self.has_feedforward_norm else None
        self.post_feedforward_layernorm = RMSNorm.of(config)

    @property
    def norm_before_mlp(self) -> RMSNorm | None:
        """The norm before the MLP, or None if the MLP reads the residual stream itself."""
        return self.pre_feedforward_layernorm

    def forward(
        self, ops: Ops, state: ResidualState, attention: AttentionPass, next_norm: RMSNorm | None
    ) -> ResidualState:
        """Returns the residual state after this layer, to which the normed outputs of attention and MLP are added."""
        mixed, state = self.attend(ops, state, attention)
        if not mixed.shape[0]:
            return state
        before = self.pre_feedforward_layernorm
        state = ops.linear_norm_add_norm(mixed, self.self_attn.o_proj, self.post_attention_layernorm, state, before)
        assert isinstance(self.mlp, GatedMLP)
        gated = ops.norm_gated_linear(state, before, self.mlp.gate_up_proj, self.mlp.activation)
        return ops.linear_norm_add_norm(gated, self.mlp.down_proj, self.post_feedforward_layernorm, state, next_norm)


class Decoder(nn.Module):
    """Embeddings, layers and the last norm: the checkpoint's `model.*`, or a pipeline stage's part of it."""

    def __init__(self, config: ModelConfig, make_layer: Callable[[ModelConfig, int], DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens: Embedding | None = None
        if config.has_embeddings:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.tensor_parallel)
        self.layers = nn.ModuleDict({str(layer): make_layer(config, layer) for layer in config.layers})
        self.norm = RMSNorm.of(config) if config.stage.is_last else None


class DecoderModel(CausalModel):
    """A causal language model of ours."""

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    checkpoint_names: ClassVar[dict[str, str]] = {}
    """Parts of this model's names, and the text that replaces them in this architecture's checkpoints."""
    unused_checkpoint_suffixes: ClassVar[tuple[str, ...]] = (
        "rotary_emb.inv_freq",
        ".input_scale",
        ".input_global_scale",
        ".input_zero_point",
        ".output_scale",
        ".output_zero_point",
        ".activation_scale",
        ".weight_shape",
    )
    """Suffixes of tensors that are not read: computed here (frequencies), static scales of activations, which stay in
    the model's dtype, or shapes, which are in the config.
    """
    stop_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that end an output beside those that the checkpoint's files name as EOS."""

    mtp_names: ClassVar[MtpNames | None] = None
    """Names of the multi-token-prediction layers of this architecture's checkpoints; None if they have none."""

    def __init__(
        self, config: ModelConfig, make_layer: Callable[[ModelConfig, int], DecoderLayer] | None = None
    ) -> None:
        """Builds the layers of `config`; `make_layer` replaces the class method of this name."""
        super().__init__()
        self.config = config
        self.model = Decoder(config, make_layer or self.make_layer)
        self.lm_head = self._make_head() if config.stage.is_last and not config.tie_word_embeddings else None
        self.vision = None
        if config.vision is not None and config.stage.is_first:
            self.vision = make_vision_encoder(config.vision, config.hidden_size)
        self._dtype = torch.get_default_dtype()
        self.taps: HiddenTaps | None = None
        self.deepstack: DeepstackFeatures | None = None
        """Features of the vision encoder that this pass adds after the first layers; the caller sets it for a pass."""
        self.tied_head_method: LinearMethod | None = None
        """Stores a tied head in memory of its own; None: it shares the embeddings' weight."""
        self._tied_head: list[Linear] = []  # in a list: it is no module of its own, its weight is the embeddings'

    @classmethod
    def make_layer(cls, config: ModelConfig, layer: int) -> DecoderLayer:
        """Returns one layer, for architectures that have layers of several classes."""
        return cls.layer_class(config, layer)

    def _make_head(self) -> Linear:
        parallel, vocab_size = self.config.tensor_parallel, self.config.vocab_size
        rows = parallel.vocabulary(vocab_size) if parallel.size > 1 else None
        return Linear(self.config.hidden_size, parallel.vocabulary_rows(vocab_size), rows=rows)

    @classmethod
    def check_split(cls, config: ModelConfig) -> None:
        """Raises ModelError if the ranks of `config.tensor_parallel` cannot share this model."""
        parallel = config.tensor_parallel
        obstacles = [
            parallel.obstacle("num_attention_heads", config.num_heads),
            parallel.obstacle("num_key_value_heads", config.num_kv_heads, copies=True),
            parallel.obstacle("intermediate_size", config.intermediate_size),
        ]
        for obstacle in filter(None, obstacles):
            raise ModelError(f"{config.architecture}: {obstacle}.")

    @classmethod
    def layer_weights(cls, config: ModelConfig) -> int:
        """Returns the approximate number of weights in a usual layer of the whole model, by which pipeline stages are
        balanced.
        """
        heads = 2 * (config.num_heads + config.num_kv_heads)
        return config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads and checks `config.json`. Raises ModelError if it has something unsupported for this architecture."""
        raise NotImplementedError(f"{cls.__name__} reads its config in its own file")

    @property
    def layers(self) -> list[DecoderLayer]:
        """The layers in the order of computation."""
        return list(self.model.layers.values())  # type: ignore[arg-type]  # ModuleDict is untyped

    @property
    def embeddings(self) -> Embedding:
        """The embeddings, which the first stage has, and the last one if the head is tied to them."""
        assert self.model.embed_tokens is not None, "this stage of the pipeline has no embeddings"
        return self.model.embed_tokens

    @property
    def last_norm(self) -> RMSNorm:
        """The norm before the head, which the last stage has."""
        assert self.model.norm is not None, "this stage of the pipeline has no head"
        return self.model.norm

    @property
    def attention_layers(self) -> list[AttentionBlock]:
        """The attention blocks of the layers, in order, for the page pool and attention backends."""
        return [layer.self_attn for layer in self.layers]

    @property
    def head(self) -> Linear:
        """The product from the hidden width to the vocabulary."""
        return self._tied_head[0] if self.lm_head is None else self.lm_head

    def checkpoint_tensors(self) -> dict[str, Placement]:
        """Maps the name of every tensor that a checkpoint must have to the memory that it fills."""
        tensors: dict[str, Placement] = {}
        for path, module in self.named_modules():
            if isinstance(module, _WITH_PLACEMENTS):
                tensors |= module.checkpoint_tensors(path)
            else:
                own = module.named_parameters(recurse=False)
                tensors |= {f"{path}.{name}".removeprefix("."): Placement(parameter) for name, parameter in own}
        return {self.checkpoint_name(name): placement for name, placement in tensors.items()}

    def checkpoint_name(self, name: str) -> str:
        """Returns the checkpoint's name of a layer or a tensor of this model."""
        whole = f"{name}."
        for ours, theirs in self.checkpoint_names.items():
            whole = whole.replace(ours, theirs)
        return whole.removesuffix(".")

    def is_unused(self, checkpoint_name: str) -> bool:
        """True if a checkpoint may have this tensor although the model does not read it."""
        tied = self.lm_head is None and checkpoint_name == "lm_head.weight"
        if self.is_elsewhere(checkpoint_name):
            return True
        unused_here = unused_suffixes(self.config.quantization)
        return tied or checkpoint_name.endswith((*self.unused_checkpoint_suffixes, *KV_SCALES, *unused_here))

    def is_elsewhere(self, checkpoint_name: str) -> bool:
        """True if another stage, another rank with whole experts, or a draft in the same checkpoint has this tensor."""
        if self.config.stage.size > 1 and self._is_of_another_stage(checkpoint_name):
            return True
        return self.config.tensor_parallel.whole_experts and self._is_of_another_expert(checkpoint_name)

    def _is_of_another_expert(self, checkpoint_name: str) -> bool:
        """True if another rank has the expert to which this tensor belongs."""
        mixture = next((module for module in self.modules() if isinstance(module, SparseMoE)), None)
        if mixture is None or (found := _EXPERT_NAME.search(checkpoint_name)) is None:
            return False
        return int(found[1]) < mixture.spec.num_experts and int(found[1]) not in mixture.local_experts

    def _is_of_another_stage(self, checkpoint_name: str) -> bool:
        """True if another stage of the pipeline has this tensor."""
        if (found := LAYER_NAME.match(checkpoint_name)) is not None:
            return int(found[1]) < self.config.num_layers and int(found[1]) not in self.config.layers
        ours = ("model.embed_tokens.", "model.norm.", "lm_head.", "vision.")
        return checkpoint_name.startswith(tuple(self.checkpoint_names.get(name, name) for name in ours))

    def take_memory(self, device: torch.device) -> None:
        """Allocates uninitialised memory for all parameters. Raises RuntimeError if there is not enough.

        `Module.to_empty` does that too, but imports sympy for tensors without memory: a second of each start.
        """
        encoder = frozenset() if self.vision is None else frozenset(self.vision.modules())
        for module in self.modules():
            if module in encoder:
                continue
            for name, meta in list(module.named_parameters(recurse=False)):
                memory = torch.empty(meta.shape, dtype=meta.dtype, device=device)
                module.register_parameter(name, nn.Parameter(memory, requires_grad=False))
        if self.vision is not None:
            self.vision.take_memory(device)

    def finish_loading(self, max_positions: int) -> None:
        """Derives everything that depends on weights and config: rotary tables, expanded norms, the tied head."""
        config, device = self.config, next(self.parameters()).device
        tables: dict[tuple[RopeParameters, int], Rotary] = {}
        for module in self.modules():
            if isinstance(module, RMSNorm | Linear | SparseMoE):
                module.finish_loading()
        for attention in self.attention_layers:
            rope, head_dim = attention.rope, attention.head_dim
            if (rope, head_dim) not in tables:
                tables[rope, head_dim] = Rotary(rope, head_dim, max_positions, self._dtype, device)
            attention.rotary = tables[rope, head_dim]
            attention.finish_loading()
        if config.tie_word_embeddings and config.stage.is_last and not self._tied_head:
            self._tied_head.append(self._make_tied_head())
        if self.model.embed_tokens is not None:
            self.model.embed_tokens.finish_loading()  # after the head that is made from them

    def _make_tied_head(self) -> Linear:
        table = self.embeddings
        if self.tied_head_method is None:
            return Linear.borrowing(table.weight, table.rows)
        head = Linear(0, 0, rows=table.rows)
        head.out_features, head.in_features = len(table.weight), table.width
        head.weight, head.method = table.weight, self.tied_head_method
        head.finish_loading()
        return head

    def release_borrowed_head(self) -> None:
        """Has `finish_loading` make a head that borrows the embeddings' memory again: those are filled anew."""
        if self.tied_head_method is None:
            self._tied_head.clear()

    def tied_head_parameters(self) -> list[Tensor]:
        """Returns the parameters of a tied head that has memory of its own."""
        if self.tied_head_method is None:
            return []
        shared = {parameter.data_ptr() for parameter in self.parameters()}
        return [each for head in self._tied_head for each in head.parameters() if each.data_ptr() not in shared]

    def embed(self, ops: Ops, token_ids: Tensor) -> Tensor:
        """Maps token ids [tokens] int64 to [tokens, hidden], in new memory: the first step of every pass."""
        return self.scale_embeddings(ops.embed(token_ids, self.embeddings))

    def enter(self, ops: Ops, hidden: Tensor) -> Tensor:
        """Begins a pass in a pipeline stage with the output [tokens, hidden] of the stage before it.

        The ranks of the stage synchronise, as they do over embeddings, so that passes may follow each other in any
        order.
        """
        if self.config.tensor_parallel.size > 1:
            ops.sum_embeddings(torch.zeros_like(hidden[:1]))
        return hidden

    def scale_embeddings(self, hidden: Tensor) -> Tensor:
        """Scales rows of the embedding table for the first layer, in place."""
        if self.config.embedding_scale != 1.0:
            hidden.mul_(torch.tensor(self.config.embedding_scale, dtype=hidden.dtype).item())
        return hidden

    def forward(self, ops: Ops, hidden: Tensor, attention: AttentionPass) -> ResidualState:
        """Maps embedded tokens [tokens, hidden] to the residual state after the last layer, before the last norm.

        The result is the state of the tokens that `attention` selects: the last layer computes only keys and values of
        others. A pipeline stage begins with the output of the stage before it for all tokens, and returns its own for
        the next.
        """
        state = ResidualState(hidden)
        layers = self.layers
        # A stage that is not the last needs no norm after its layers: one of its own stands in where verbs want some.
        final = layers[-1].input_layernorm if self.model.norm is None else self.model.norm
        next_norms = [*(layer.input_layernorm for layer in layers[1:]), final]
        taps = self.taps if self.taps is not None and self.taps.is_enabled else None
        last = len(layers) - 1
        if taps is not None:
            taps.begin()
        for number, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            state = layer(ops, state, attention, next_norm)
            if self.deepstack is not None and number < len(self.deepstack.layers):
                state = self.deepstack.add(state, number, attention.logits_indices if number == last else None)
            if taps is not None and number in taps.layers:
                taps.keep(state.residual, None if number == last else attention.logits_indices)
        if self.config.tensor_parallel.size > 1 and not state.residual.shape[0]:
            # The last layer had nothing to sum: the ranks meet, so that a pass which has ended on one of them has
            # written its keys and values on all. KV transfer gives them away then.
            ops.sum_embeddings(torch.zeros_like(hidden[:1]))
        return state

    def hidden(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns the hidden states after the last norm: [rows, hidden]."""
        return ops.norm(state, self.last_norm)

    def logits(
        self,
        ops: Ops,
        state: ResidualState,
        out: Tensor | None = None,
        *,
        head: Linear | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """Applies the last norm and the head: [rows, vocab], written to `out` if one is given.

        `head` and `norm` replace the model's own; that head has some of the model's rows.
        """
        logits = ops.logits(state, norm or self.last_norm, self.head if head is None else head, out)
        if self.config.logits_divisor != 1.0:
            logits.div_(self.config.logits_divisor)
        if (softcap := self.config.logits_softcap) is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits
