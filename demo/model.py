"""Qwen3 in plain PyTorch, for training and for judging the result; parameter names are those of Hugging Face.

Knows shapes and arithmetic; knows nothing of data, optimisers or files. The engine has its own implementation.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of config.json that the arithmetic needs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float

    @classmethod
    def from_config(cls, path: Path) -> "Shape":
        """Reads a Hugging Face config.json."""
        config = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


@dataclass(slots=True)
class Cache:
    """Keys and values of one layer while generating, and how much of them is filled."""

    keys: Tensor  # [batch, kv_heads, max_tokens, head_dim]
    values: Tensor  # [batch, kv_heads, max_tokens, head_dim]
    filled: int = 0


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, mask: Tensor | None) -> Tensor:
        """Causal over x alone without a cache; with one, over what it holds too, as the mask allows."""
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if cache is not None:
            end = cache.filled + length
            cache.keys[:, :, cache.filled : end] = k
            cache.values[:, :, cache.filled : end] = v
            cache.filled = end
            k, v = cache.keys[:, :, :end], cache.values[:, :, :end]
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps each position alone."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Attention and MLP, each added to the stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, layers and the last norm: `model.*` in the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Qwen3(nn.Module):
    """The language model; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), frequencies).repeat(1, 2)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)  # [positions, head_dim] fp32
        self.register_buffer("sin", angles.sin(), persistent=False)

    def initialise(self) -> None:
        """Small normal weights; what writes to the stream starts smaller, the deeper the model."""
        depth_scale = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5 * (depth_scale if writes else 1.0)
                nn.init.normal_(parameter, std=std)

    def hidden(self, ids: Tensor, compute_dtype: torch.dtype, compiled: bool) -> Tensor:
        """The normed last hidden states of whole rows; `compiled` goes through the layers' compiled calls."""
        length = ids.shape[1]
        cos, sin = self.cos[:length].to(compute_dtype), self.sin[:length].to(compute_dtype)
        x = self.model.embed_tokens(ids).to(compute_dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin) if compiled else layer.forward(x, cos, sin)
        normed: Tensor = self.model.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def step(self, ids: Tensor, positions: Tensor, caches: list[Cache], mask: Tensor) -> Tensor:
        """Logits of the last position of each row, with caches; `positions` [batch, length], `mask` True = seen."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[positions][:, None].to(x.dtype), self.sin[positions][:, None].to(x.dtype)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x = layer.forward(x, cos, sin, cache, mask)
        return self.logits(self.model.norm(x[:, -1]))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
