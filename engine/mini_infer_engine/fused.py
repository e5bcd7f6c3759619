"""A decoder's layers by fused kernels: what the GPU runs instead of the modules' own forward, from the same weights.

Few rows: eight kernels a layer; bias, gate and residual ride along with the products. Many rows: cuBLAS
for the products. It knows nothing of sequences: attention is a function that it is handed.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from mini_infer_engine.kernels.rms_norm import rms_norm
from mini_infer_engine.kernels.rope_kv import rope_kv
from mini_infer_engine.kernels.silu_mul import silu_mul
from mini_infer_engine.kernels.skinny_linear import MAX_ROWS, skinny_linear
from mini_infer_engine.kernels.tuned import skinny_config
from mini_infer_engine.kv_pool import KVPool
from mini_infer_engine.layers.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.norm import RMSNorm

Attend = Callable[[Tensor, Tensor, int], Tensor]
"""(q [tokens, heads, head_dim], the layer's pages, layer) to [tokens, heads * head_dim]."""


class FusedDecoder:
    """Borrows a loaded model's weights; `forward` equals the model's own up to rounding."""

    def __init__(self, model: DecoderModel, pool: KVPool) -> None:
        self.model = model
        self.layers: list[DecoderLayer] = list(model.model.layers)  # type: ignore[arg-type]  # ModuleList is untyped
        self.layer_pools = list(pool.pages.unbind(1))  # views [pages, 2, page_size, kv_heads, head_dim]

    def forward(self, hidden: Tensor, positions: Tensor, kv_index: Tensor, attend: Attend) -> Tensor:
        """Embedded tokens [tokens, hidden] to the residual stream after the last layer, before the last norm."""
        assert self.model.rotary is not None
        table = self.model.rotary.table
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            q_norm, k_norm = attention.q_norm, attention.k_norm
            qkv = _product(hidden, attention.qkv_proj, norm=layer.input_layernorm)
            q = rope_kv(
                qkv,
                positions,
                kv_index,
                table,
                self.layer_pools[index],
                attention.num_heads,
                None if q_norm is None else q_norm.weight,
                None if k_norm is None else k_norm.weight,
                0.0 if q_norm is None else q_norm.eps,
            )
            mixed = attend(q, self.layer_pools[index], index)
            hidden = _product(mixed, attention.o_proj, residual=hidden)
            gated = _product(hidden, layer.mlp.gate_up_proj, norm=layer.post_attention_layernorm, gated=True)
            hidden = _product(gated, layer.mlp.down_proj, residual=hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The last norm and the head: [rows, hidden] to [rows, vocab]."""
        head = self.model.model.embed_tokens if self.model.lm_head is None else self.model.lm_head
        norm = self.model.model.norm
        return _dense(rms_norm(hidden, norm.weight, norm.eps), head.weight)


def _product(
    x: Tensor, linear: Linear, *, norm: RMSNorm | None = None, residual: Tensor | None = None, gated: bool = False
) -> Tensor:
    """Residual + gate(linear(norm(x))), each part where given."""
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    return _dense(x, linear.weight, linear.bias, residual, gated=gated)


def _dense(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, gated: bool = False
) -> Tensor:
    """Residual + gate(x @ weight.T + bias): by our kernel where that was measured faster, else cuBLAS."""
    rows, (columns, width) = x.shape[0], weight.shape
    if rows <= MAX_ROWS and not (gated and bias is not None):
        config = skinny_config(rows, columns // 2 if gated else columns, width, gated=gated)
        if config is not None:
            return skinny_linear(x, weight, config, bias=bias, residual=residual, gated=gated)
    if residual is not None:
        out = residual.addmm_(x, weight.t())  # in place: cuBLAS would copy the residual first
        return out if bias is None else out.add_(bias)
    out = functional.linear(x, weight, bias)
    return silu_mul(out) if gated else out
