"""A decoder's layers by fused kernels: what the GPU runs instead of the modules' own forward, from the same weights.

Few rows: five kernels a layer; norms, bias, gate and residual ride along with the products. Many rows: cuBLAS
for the products. It knows nothing of sequences: attention is a function that it is handed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from mini_infer_engine.kernels.attention.rope_kv import Rotation
from mini_infer_engine.kernels.gemm.gemm_config import DeferredRMSNorm
from mini_infer_engine.kernels.gemm.gemm_dispatch import small_m_linear, small_m_linear_add_norm
from mini_infer_engine.kernels.gemm.split_k_gemm import split_k_gemm
from mini_infer_engine.kernels.norm.rms_norm import add_rms_norm, rms_norm
from mini_infer_engine.kernels.norm.silu_mul import silu_mul
from mini_infer_engine.kernels.policy import KernelPolicy
from mini_infer_engine.kernels.workspace import Workspace
from mini_infer_engine.layers.decoder import DecoderLayer, DecoderModel
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.runtime.kv_pool import KVPool


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
class LogitsSelection:
    """The tokens whose stream is read after the last layer, which computes only keys and values of the others."""

    rows: Tensor  # [wanted]
    attend: Attend
    """Writes keys and values of all tokens, returns attention of these alone."""


@dataclass(frozen=True, slots=True)
class ResidualState:
    """The residual stream between two products."""

    residual: Tensor  # [rows, hidden]
    normed: Tensor | DeferredRMSNorm | None = None
    """What the next norm makes of it, where the last product has done that or begun it."""

    def select(self, rows: Tensor) -> "ResidualState":
        """Some of its rows, before the next norm."""
        return ResidualState(self.residual.index_select(0, rows))


class FusedDecoder:
    """Borrows a loaded model's weights; `forward` equals the model's own up to rounding."""

    def __init__(self, model: DecoderModel, pool: KVPool, policy: KernelPolicy, workspace: Workspace) -> None:
        self.model = model
        self.policy = policy
        self.workspace = workspace
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

    def forward(self, hidden: Tensor, attend: Attend, wanted: LogitsSelection | None = None) -> ResidualState:
        """Embedded tokens [tokens, hidden] to the residual stream after the last layer, before the last norm.

        Of all tokens, or of those that are wanted.
        """
        stream = ResidualState(hidden)
        next_norms = [layer.input_layernorm for layer in self.layers[1:]] + [self.model.model.norm]
        for layer, attention_layer, next_norm in zip(self.layers, self.attention_layers, next_norms, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = self._norm_linear(stream, layer.input_layernorm, attention.qkv_proj.weight, attention.qkv_proj.bias)
            if wanted is not None and layer is self.layers[-1]:
                stream, attend = stream.select(wanted.rows), wanted.attend
            mixed = attend(qkv, attention_layer)
            if not mixed.shape[0]:
                break
            stream = self._linear_add_norm(mixed, attention.o_proj, stream, layer.post_attention_layernorm)
            norm, gate_up = layer.post_attention_layernorm, mlp.gate_up_proj
            gated = self._norm_linear(stream, norm, gate_up.weight, gate_up.bias, gated=True)
            stream = self._linear_add_norm(gated, mlp.down_proj, stream, next_norm)
        return stream

    def logits(self, stream: ResidualState) -> Tensor:
        """The last norm and the head: [rows, vocab]."""
        head = self.model.model.embed_tokens if self.model.lm_head is None else self.model.lm_head
        return self._norm_linear(stream, self.model.model.norm, head.weight, None)

    def _norm_linear(
        self, stream: ResidualState, norm: RMSNorm, weight: Tensor, bias: Tensor | None, *, gated: bool = False
    ) -> Tensor:
        """gate(norm(residual) @ weight.T + bias)."""
        # A gated product of ours has no bias.
        config = None if gated and bias is not None else self.policy.gemm_config(stream.residual, weight, gated=gated)
        x = stream.normed
        if config is not None:
            x = rms_norm(stream.residual, norm.weight, norm.eps) if x is None else x
            return small_m_linear(x, weight, config, workspace=self.workspace, bias=bias, gated=gated)
        if not isinstance(x, Tensor):
            x = rms_norm(stream.residual, norm.weight, norm.eps)
        out = functional.linear(x, weight, bias)
        return silu_mul(out) if gated else out

    def _linear_add_norm(self, x: Tensor, linear: Linear, stream: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """Residual + linear(x), prepared for the norm that comes next where that costs nothing."""
        weight, bias, residual = linear.weight, linear.bias, stream.residual
        config = self.policy.gemm_config(x, weight)
        if config is not None:
            out, deferred_norm = small_m_linear_add_norm(
                x,
                weight,
                config,
                workspace=self.workspace,
                bias=bias,
                residual=residual,
                norm_weight=next_norm.weight,
                eps=next_norm.eps,
            )
            return ResidualState(out, deferred_norm)
        splits = self.policy.k_splits(x.shape[0], *weight.shape)
        if splits > 1:
            summands = split_k_gemm(x, weight, splits)
            if bias is not None:
                summands[0].add_(bias)
            return ResidualState(residual, add_rms_norm(residual, summands, next_norm.weight, next_norm.eps))
        out = residual.addmm_(x, weight.t())  # in place: cuBLAS would copy the residual first
        return ResidualState(out if bias is None else out.add_(bias))
