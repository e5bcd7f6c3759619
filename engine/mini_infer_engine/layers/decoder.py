"""The decoder-only transformer that the supported architectures share; their files say what differs.

It computes hidden states and logits for a flat list of tokens. Which token belongs to which sequence is known only to
the attention pass that it is handed.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.attention.base import AttentionPass
from mini_infer_engine.config.model_config import ModelConfig
from mini_infer_engine.layers.attention import Attention
from mini_infer_engine.layers.linear import Linear, blocked_linear, blocked_weight
from mini_infer_engine.layers.mlp import GatedMLP
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.layers.rotary import Rotary


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, has_qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, has_qk_norm=has_qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionPass, wanted: Tensor | None = None
    ) -> Tensor:
        """The residual stream [tokens, hidden], changed in place; or its wanted rows in new memory."""
        mixed = self.self_attn(self.input_layernorm(x), cos, sin, attention, wanted)
        if wanted is not None:
            x = x.index_select(0, wanted)
        x.add_(mixed)
        return x.add_(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """Embeddings, layers and the last norm: the checkpoint's `model.*`."""

    def __init__(self, config: ModelConfig, *, has_qk_norm: bool) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, has_qk_norm=has_qk_norm) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Embedding(nn.Module):
    """A row of the table for each token."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 to [tokens, width]."""
        return functional.embedding(token_ids, self.weight)


class DecoderModel(nn.Module):
    """A causal language model; made under the target device and dtype, filled by `loader`, then `finish_loading`."""

    has_qk_norm: ClassVar[bool] = False
    unused_checkpoint_suffixes: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    """Tensors of old checkpoints that are computed here."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, has_qk_norm=self.has_qk_norm)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.rotary: Rotary | None = None
        self.blocked_head: Tensor | None = None  # of tied embeddings, which also stay as a table

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every tensor that a checkpoint must have, by name, with the memory that it fills."""
        tensors: dict[str, Tensor] = {}
        for path, module in self.named_modules():
            if isinstance(module, Linear):
                tensors |= module.checkpoint_tensors(path)
            else:
                tensors |= {f"{path}.{name}": p for name, p in module.named_parameters(recurse=False)}
        return tensors

    def is_unused(self, checkpoint_name: str) -> bool:
        """Whether a checkpoint may have this tensor although the model does not read it."""
        tied = self.lm_head is None and checkpoint_name == "lm_head.weight"
        return tied or checkpoint_name.endswith(self.unused_checkpoint_suffixes)

    def finish_loading(self, max_positions: int) -> None:
        """Make what is derived from weights and config: rotary tables and laid-out norms."""
        weight = self.model.embed_tokens.weight
        config = self.config
        self.rotary = Rotary(config.rope, config.head_dim, max_positions, weight.dtype, weight.device)
        for module in self.modules():
            if isinstance(module, Attention | Linear):
                module.finish_loading()
        if self.lm_head is None:
            self.blocked_head = blocked_weight(weight)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionPass, wanted: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the last norm, [tokens, hidden], for [tokens] int64 ids and positions.

        With `wanted`, token indices int64, only theirs: of the others the last layer makes but keys and values.
        """
        assert self.rotary is not None
        cos, sin = self.rotary.lookup(positions)
        x = self.model.embed_tokens(token_ids)
        *layers, last = self.model.layers
        for layer in layers:
            x = layer(x, cos, sin, attention)
        x = last(x, cos, sin, attention, wanted)
        hidden: Tensor = self.model.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""
        if self.lm_head is not None:
            scores: Tensor = self.lm_head(hidden)
            return scores
        if self.blocked_head is not None:
            return blocked_linear(hidden, self.blocked_head)
        return functional.linear(hidden, self.model.embed_tokens.weight)
