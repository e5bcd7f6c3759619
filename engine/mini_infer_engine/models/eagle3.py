"""Defines EAGLE-3 (Li et al., arXiv:2503.01840): a draft of one layer over fused hidden states of three target layers.

The layer's queries, keys and values read the normalised embedding beside the normalised hidden state. The draft has an
output matrix of its own, often for a part of the vocabulary, whose tokens `d2t` names: what is to be added to a number
of a token there to get the target's.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.linear import Linear, PackedLinear
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.models.causal_model import StoredWeights
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.models.hidden_draft import HiddenDraft
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState

_LAYER = "model.layers.0."


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """The content of an EAGLE-3 checkpoint's config.json."""

    layer: ModelConfig
    """The decoder layer, of Llama's kind; its vocabulary is the target's."""
    tapped_layers: tuple[int, ...]
    """The target's layers whose outputs are fused, from 0, in ascending order."""
    target_hidden_size: int
    draft_vocab_size: int
    """Tokens that it may draft."""
    norm_before_residual: bool
    """True if the layer adds its outputs to the normalised hidden state, False if to the fused one."""


class Eagle3Layer(DecoderLayer):
    """Llama's layer, whose attention reads the embedding and the hidden state side by side."""

    norm_before_residual: bool = False

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.hidden_norm = RMSNorm.of(config)

    def make_attention(self, config: ModelConfig, layer: int) -> AttentionBlock:
        """Returns attention whose projections read twice the hidden width."""
        attention = Attention(config, layer)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
        parts = {name: config.tensor_parallel.heads(number, config.head_dim) for name, number in heads.items()}
        attention.qkv_proj = PackedLinear(2 * config.hidden_size, parts, bias=config.qkv_bias)
        return attention

    def forward(
        self, ops: Ops, state: ResidualState, attention: AttentionPass, next_norm: RMSNorm | None
    ) -> ResidualState:
        """Returns the residual state after the layer; `state` has embedding and hidden state side by side."""
        assert isinstance(self.self_attn, Attention)
        assert next_norm is not None, "the output matrix begins with a norm"
        embeddings, hidden = (half.contiguous() for half in state.residual.chunk(2, dim=-1))
        normed = ops.norm(ResidualState(hidden), self.hidden_norm)
        both = torch.cat((ops.norm(ResidualState(embeddings), self.input_layernorm), normed), dim=-1)
        mixed = attention.attend(ops.norm_linear(ResidualState(both), None, self.self_attn.qkv_proj), self.self_attn)
        residual = ResidualState(normed if self.norm_before_residual else hidden)
        if attention.logits_indices is not None:
            residual = residual.select(attention.logits_indices)
        if not mixed.shape[0]:
            return residual
        residual = ops.linear_add_norm(mixed, self.self_attn.o_proj, residual, self.post_attention_layernorm)
        return self.feed_forward(ops, residual, next_norm)


class Eagle3Model(HiddenDraft):
    """An EAGLE-3 head for one target."""

    method: ClassVar[str] = "eagle3"

    def __init__(self, target: DecoderModel, shape: Eagle3Shape, *, has_embeddings: bool) -> None:
        super().__init__(shape.layer, target, Eagle3Layer)
        config, self.shape = shape.layer, shape
        (layer,) = self.layers
        assert isinstance(layer, Eagle3Layer)
        layer.norm_before_residual = shape.norm_before_residual
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size) if has_embeddings else None
        self.fc = Linear(len(shape.tapped_layers) * shape.target_hidden_size, config.hidden_size)
        self.norm = RMSNorm.of(config)
        self.lm_head = Linear(config.hidden_size, shape.draft_vocab_size)
        self.tapped_layers, self.hidden_width = shape.tapped_layers, config.hidden_size
        self.d2t: nn.Parameter | None = None
        if shape.draft_vocab_size < config.vocab_size:
            self.d2t = nn.Parameter(torch.empty(shape.draft_vocab_size, dtype=torch.int64), requires_grad=False)
        self._token_ids: Tensor | None = None  # [draft_vocab_size] int64; None: all
        self._layer_name = "layers.0."

    @property
    def embeddings(self) -> Embedding:
        """The draft's own table of embeddings, or the target's."""
        return self.target.embeddings if self.embed_tokens is None else self.embed_tokens

    @property
    def token_ids(self) -> Tensor | None:
        """The tokens that it may draft, [draft_vocab_size] int64; None: all. Valid once the weights are loaded."""
        if self.d2t is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def read_names(self, checkpoint: StoredWeights) -> None:
        """Finds out if the layer has the name of the original checkpoints or that of the `speculators` format."""
        if any(name.startswith("midlayer.") for name in checkpoint.tensors):
            self._layer_name = "midlayer."

    def checkpoint_name(self, name: str) -> str:
        """Returns the checkpoint's name of a tensor."""
        return self._layer_name + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name

    def is_unused(self, checkpoint_name: str) -> bool:
        """True for `t2d`, the inverse of `d2t`, and for a `d2t` that names all tokens."""
        return checkpoint_name in ("t2d", "d2t") or super().is_unused(checkpoint_name)

    def finish_loading(self, max_positions: int) -> None:
        """Derives everything that depends on weights and config."""
        super().finish_loading(max_positions)
        self._token_ids = self.token_ids
        if self.embed_tokens is not None:
            self.embed_tokens.finish_loading()

    def embed(self, ops: Ops, token_ids: Tensor) -> Tensor:
        """Maps token ids [tokens] int64 to embeddings [tokens, hidden], in new memory."""
        return super().embed(ops, token_ids) if self.embed_tokens is None else ops.embed(token_ids, self.embed_tokens)

    def fuse(self, ops: Ops, states: Tensor) -> Tensor:
        """Returns the fused outputs of the tapped layers."""
        return ops.norm_linear(ResidualState(states), None, self.fc)

    def combine(self, ops: Ops, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Returns both side by side: [tokens, 2 * hidden]."""
        del ops
        return torch.cat((embeddings, hidden), dim=-1)

    def forward(self, ops: Ops, hidden: Tensor, attention: AttentionPass) -> ResidualState:
        """Returns the state after the layer, before the norm."""
        (layer,) = self.layers
        state: ResidualState = layer(ops, ResidualState(hidden), attention, self.norm)
        return state

    def own_hidden(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns the layer's output before the norm."""
        del ops
        return state.residual

    def logits(
        self,
        ops: Ops,
        state: ResidualState,
        out: Tensor | None = None,
        *,
        head: Linear | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """Returns logits [rows, vocab] of the target's vocabulary. Tokens that cannot be drafted keep the values of
        `out`, which must be -inf, or are -inf if there is none.
        """
        head, norm = head or self.lm_head, norm or self.norm
        assert head is not None
        if self._token_ids is None:
            return ops.logits(state, norm, head, out)
        own = ops.logits(state, norm, head)
        if out is None:
            out = own.new_full((len(own), self.config.vocab_size), float("-inf"))
        return out.index_copy_(1, self._token_ids, own)
