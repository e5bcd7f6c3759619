"""A decoder's layers by fused kernels: what the GPU runs instead of the modules' own forward, from the same weights.

Few rows: five kernels a layer; norms, bias, gate and residual ride along with the products. Many rows: cuBLAS
for the products. It knows nothing of sequences: attention is a function that it is handed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from mini_infer_engine.kernels.device import has_our_gluon, shared_memory_bytes
from mini_infer_engine.kernels.rms_norm import add_rms_norm, rms_norm
from mini_infer_engine.kernels.rope_kv import Rotation
from mini_infer_engine.kernels.silu_mul import silu_mul
from mini_infer_engine.kernels.skinny_cut import MAX_ROWS, AheadConfig, HalfNormed, SkinnyConfig, suits_ahead
from mini_infer_engine.kernels.skinny_linear import skinny_linear, skinny_linear_then_norm
from mini_infer_engine.kernels.split_k_linear import k_splits, split_k_linear
from mini_infer_engine.kernels.tuned import CUT_BYTES, ahead_config, skinny_config
from mini_infer_engine.kv_pool import KVPool
from mini_infer_engine.layers.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What attention needs to know of a layer."""

    pages: Tensor  # [pages, 2, page_size, kv_heads, head_dim], a view of the pool
    rotation: Rotation
    sliding_window: int | None


Attend = Callable[..., Tensor]
"""(q, k and v [tokens, (heads + 2 kv_heads) * head_dim] side by side before rotation, AttentionLayer, out or none).

It rotates q and k, writes k and v into their pages and returns [tokens, heads * head_dim].
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tokens whose stream is read after the last layer, which computes only keys and values of the others."""

    rows: Tensor  # [wanted]
    attend: Attend
    """Writes keys and values of all tokens, returns attention of these alone."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream between two products."""

    residual: Tensor  # [rows, hidden]
    normed: Tensor | HalfNormed | None = None
    """What the next norm makes of it, where the last product has done that or begun it."""

    def select(self, rows: Tensor) -> "Stream":
        """Some of its rows, before the next norm."""
        return Stream(self.residual.index_select(0, rows))


class FusedDecoder:
    """Borrows a loaded model's weights; `forward` equals the model's own up to rounding."""

    def __init__(self, model: DecoderModel, pool: KVPool) -> None:
        self.model = model
        self.layers: list[DecoderLayer] = list(model.model.layers)  # type: ignore[arg-type]  # ModuleList is untyped
        pools = pool.pages.unbind(1)
        self.attention_layers = [self._attention_layer(index, pages) for index, pages in enumerate(pools)]

    def _attention_layer(self, index: int, pages: Tensor) -> AttentionLayer:
        assert self.model.rotary is not None
        attention, table = self.layers[index].self_attn, self.model.rotary.table
        q_norm, k_norm = attention.q_norm, attention.k_norm
        rotation = Rotation(table)
        if q_norm is not None and k_norm is not None:
            rotation = Rotation(table, q_norm.weight, k_norm.weight, q_norm.eps)
        return AttentionLayer(pages, rotation, self.model.config.sliding_windows[index])

    def forward(self, hidden: Tensor, attend: Attend, wanted: Wanted | None = None) -> Stream:
        """Embedded tokens [tokens, hidden] to the residual stream after the last layer, before the last norm.

        Of all tokens, or of those that are wanted.
        """
        stream = Stream(hidden)
        next_norms = [layer.input_layernorm for layer in self.layers[1:]] + [self.model.model.norm]
        for layer, attention_layer, next_norm in zip(self.layers, self.attention_layers, next_norms, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = _normed_product(stream, layer.input_layernorm, attention.qkv_proj.weight, attention.qkv_proj.bias)
            if wanted is not None and layer is self.layers[-1]:
                stream, attend = stream.select(wanted.rows), wanted.attend
            mixed = attend(qkv, attention_layer)
            if not mixed.shape[0]:
                break
            stream = _residual_product(mixed, attention.o_proj, stream, layer.post_attention_layernorm)
            norm, gate_up = layer.post_attention_layernorm, mlp.gate_up_proj
            gated = _normed_product(stream, norm, gate_up.weight, gate_up.bias, gated=True)
            stream = _residual_product(gated, mlp.down_proj, stream, next_norm)
        return stream

    def logits(self, stream: Stream) -> Tensor:
        """The last norm and the head: [rows, vocab]."""
        head = self.model.model.embed_tokens if self.model.lm_head is None else self.model.lm_head
        return _normed_product(stream, self.model.model.norm, head.weight, None)


def _normed_product(
    stream: Stream, norm: RMSNorm, weight: Tensor, bias: Tensor | None, *, gated: bool = False
) -> Tensor:
    """gate(norm(residual) @ weight.T + bias)."""
    # A gated product of ours has no bias.
    config = None if gated and bias is not None else _skinny(stream.residual, weight, gated=gated)
    x = stream.normed
    if config is not None:
        x = rms_norm(stream.residual, norm.weight, norm.eps) if x is None else x
        return skinny_linear(x, weight, config, bias=bias, gated=gated)
    if not isinstance(x, Tensor):
        x = rms_norm(stream.residual, norm.weight, norm.eps)
    out = functional.linear(x, weight, bias)
    return silu_mul(out) if gated else out


def _residual_product(x: Tensor, linear: Linear, stream: Stream, next_norm: RMSNorm) -> Stream:
    """Residual + linear(x), prepared for the norm that comes next where that costs nothing."""
    weight, bias, residual = linear.weight, linear.bias, stream.residual
    config = _skinny(x, weight)
    if config is not None:
        out, half_normed = skinny_linear_then_norm(
            x, weight, config, bias=bias, residual=residual, norm_weight=next_norm.weight, eps=next_norm.eps
        )
        return Stream(out, half_normed)
    splits = k_splits(x.shape[0], *weight.shape)
    if splits > 1:
        summands = split_k_linear(x, weight, splits)
        if bias is not None:
            summands[0].add_(bias)
        return Stream(residual, add_rms_norm(residual, summands, next_norm.weight, next_norm.eps))
    out = residual.addmm_(x, weight.t())  # in place: cuBLAS would copy the residual first
    return Stream(out if bias is None else out.add_(bias))


def _skinny(x: Tensor, weight: Tensor, *, gated: bool = False) -> SkinnyConfig | AheadConfig | None:
    """How our kernel cuts this product; None: too many rows, a GPU that the cuts do not fit, or cuBLAS is faster."""
    rows, (columns, width) = x.shape[0], weight.shape
    if rows > MAX_ROWS or shared_memory_bytes(x.device) < CUT_BYTES:
        return None
    columns = columns // 2 if gated else columns
    if has_our_gluon(x.device) and suits_ahead(x, weight):
        return ahead_config(rows, columns, width, gated=gated)
    return skinny_config(rows, columns, width, x.dtype, gated=gated)
