"""Describes DeepSeek Sparse Attention (DeepSeek-V3.2-Exp 2025, arXiv 2512.02556) as data: latent attention whose tokens
each read the `top_k` earlier ones that an indexer scores highest.

A token's cache entry is its latent, then the indexer's key. Backends score, choose and attend.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.latent_attention import LatentAttention, LatentSpec
from mini_infer_engine.layers.linear import Linear

_EPS = 1e-6
"""The epsilon of the norm of the indexer's keys, whatever the model's norms have (transformers' modeling_deepseek_v32).
"""


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The widths of an indexer."""

    num_heads: int
    head_dim: int
    """The width of its keys, which its heads share; the first `LatentSpec.rope_dim` dimensions are rotated."""
    top_k: int
    """Tokens that a token reads, itself among them."""
    interleaved: bool
    """True if a rotated pair is (2i, 2i + 1) instead of (i, i + rope_dim / 2)."""

    @property
    def query_width(self) -> int:
        """The width of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        """The factor of a score's products and weights."""
        return float((self.head_dim * self.num_heads) ** -0.5)


class Indexer(nn.Module):
    """The lightning indexer: a token's score is the sum over heads of weight * relu(query * key), in fp32.

    It is whole on every rank. The published one rotates both by a Hadamard matrix, which changes no product, and rounds
    them to FP8.
    """

    def __init__(self, config: ModelConfig, latent: LatentSpec, spec: IndexerSpec) -> None:
        super().__init__()
        assert latent.q_rank is not None, "the indexer reads the latent of queries"
        self.spec = spec
        self.wq_b = Linear(latent.q_rank, spec.query_width)
        self.wk = Linear(config.hidden_size, spec.head_dim)
        self.k_norm = _KeyNorm(spec.head_dim)
        self.weights_proj = _HeadWeights(config.hidden_size, spec.num_heads)


class _KeyNorm(nn.Module):
    """A layer norm (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised x."""
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, _EPS)


class _HeadWeights(nn.Module):
    """The product that weighs heads; it is not quantised, and fp32 whatever the model's dtype."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        weight = torch.empty(num_heads, hidden_size, dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [tokens, hidden] to weights [tokens, heads] fp32."""
        return functional.linear(x.float(), self.weight)


class SparseLatentAttention(LatentAttention):
    """Latent attention over chosen tokens.

    For it `AttentionPass.attend` reads what `LatentAttention` documents, then the indexer's key after its norm, its
    queries, and the weights of its heads, whose fp32 is viewed in the model's dtype. A layer without an indexer reads
    the tokens that the last layer with one has chosen, and has none of the three.
    """

    def __init__(
        self, config: ModelConfig, layer: int, latent: LatentSpec, indexer: IndexerSpec, *, has_indexer: bool
    ) -> None:
        super().__init__(config, layer, latent)
        self.index = indexer
        self.indexer = Indexer(config, latent, indexer) if has_indexer else None
