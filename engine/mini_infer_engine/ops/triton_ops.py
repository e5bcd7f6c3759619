"""Implements the operations with our kernels, for NVIDIA GPUs: from the same weights as torch's, equal up to rounding.

For few rows, norms, bias, gate and residual sum are fused into the products, so that a layer is five kernels. For many
rows, cuBLAS computes the products, with split-K where the output has too few tiles for all SMs.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.communication.collectives import NO_COLLECTIVES, Collectives
from mini_infer_engine.config.model.model_config import Activation
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.gemm.fp8_block_gemm import fp8_block_linear
from mini_infer_engine.kernels.gemm.gemm_config import MAX_M, DeferredRMSNorm
from mini_infer_engine.kernels.gemm.gemm_dispatch import small_m_linear, small_m_linear_add_norm
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.gemm.grouped_weight_gemm import grouped_weight_linear
from mini_infer_engine.kernels.gemm.int8_gemm import int8_linear
from mini_infer_engine.kernels.gemm.quantized_gemm import quantized_linear
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight
from mini_infer_engine.kernels.gemm.split_k_gemm import split_k_gemm
from mini_infer_engine.kernels.moe.expert_gemv import expert_gemv
from mini_infer_engine.kernels.moe.grouped_gemm import grouped_experts
from mini_infer_engine.kernels.moe.mx_experts import mx_experts
from mini_infer_engine.kernels.moe.route import Routing, route
from mini_infer_engine.kernels.norm.add_gated import add_gated
from mini_infer_engine.kernels.norm.rms_norm import add_rms_norm, rms_norm
from mini_infer_engine.kernels.norm.silu_mul import silu_mul
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.grouped import GroupedMethod
from mini_infer_engine.layers.linear import UNQUANTIZED, Linear
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.layers.packed import PackedMethod
from mini_infer_engine.ops.base import PendingSum, ResidualState
from mini_infer_engine.ops.torch_ops import ACTIVATIONS, norm_shared_columns_
from mini_infer_engine.ops.ungated_experts import ungated_experts

if TYPE_CHECKING:
    from mini_infer_engine.communication.peer_memory import PeerMemory


class TritonOps:
    """Implements `ops.base.Ops` with kernels. The kernel policy chooses between our GEMMs and cuBLAS."""

    def __init__(
        self, kernels: KernelContext, collectives: Collectives = NO_COLLECTIVES, *, overlaps_sums: bool = False
    ) -> None:
        """Hides the all-reduce of many rows behind products if `overlaps_sums`; CUDA graphs cannot record that."""
        self._policy, self._workspace = kernels.policy, kernels.workspace
        self._collectives, self._overlaps_sums = collectives, overlaps_sums

    def embed(self, token_ids: Tensor, embedding: Embedding) -> Tensor:
        """Looks up the embeddings, and sums them over ranks."""
        return self._collectives.begin(embedding(token_ids))

    def sum_embeddings(self, hidden: Tensor) -> Tensor:
        """Sums the embeddings over ranks."""
        return self._collectives.begin(hidden)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over ranks."""
        return self._collectives.all_reduce(x)

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """Gathers the columns of all ranks."""
        return self._collectives.gather_columns(x, width)

    def norm_linear(self, state: ResidualState, norm: RMSNorm | None, linear: Linear) -> Tensor:
        """Computes the norm and the product, fused for few rows."""
        return self._product(state, norm, linear)

    def logits(self, state: ResidualState, norm: RMSNorm | None, head: Linear, out: Tensor | None = None) -> Tensor:
        """Computes norm and product, and gathers the ranks' columns if they share out the vocabulary."""
        if head.rows is not None:
            peers = self._collectives.peers
            part = None
            if peers is not None:
                part = peers.logits_part(state.residual.shape[0], head.out_features, state.residual.dtype)
            return self._collectives.gather_columns(self._product(state, norm, head, part), head.rows.total, out)
        return self._product(state, norm, head, out)

    def _product(self, state: ResidualState, norm: RMSNorm | None, head: Linear, out: Tensor | None = None) -> Tensor:
        """Computes the product of one layer on this rank alone, into `out` if it is given."""
        pending = state.pending
        if pending is not None and norm is not None:
            return self._product_by_parts(pending, head, out)
        weight = kernel_weight(head)
        config = self._policy.gemm_config(state.residual, weight)
        if config is not None and not isinstance(weight, GroupedWeight):
            x = self._norm_or_deferred(state, norm)
            return small_m_linear(x, weight, config, workspace=self._workspace, bias=head.bias, out=out)
        x = self.norm(state, norm)
        if not isinstance(weight, Tensor):
            return self.quantized(x, weight, head.bias, out)
        if out is None:
            return functional.linear(x, head.weight, head.bias)
        if head.bias is None:
            return torch.mm(x, head.weight.t(), out=out)
        return torch.addmm(head.bias, x, head.weight.t(), out=out)

    def _product_by_parts(self, pending: PendingSum, linear: Linear, out: Tensor | None) -> Tensor:
        """Computes the product of rows whose sum is still arriving: for each part that is there, while the others are
        copied.
        """
        for rows, normed in pending.parts():
            if out is None:
                out = normed.new_empty((pending.num_rows, linear.out_features))
            self._product(ResidualState(normed), None, linear, out[rows])
        assert out is not None, "a pending sum has parts"
        return out

    def norm_gated_linear(
        self, state: ResidualState, norm: RMSNorm | None, linear: Linear, activation: Activation
    ) -> Tensor:
        """Computes the gated product, with the activation in the GEMM's epilogue for few rows."""
        # What the epilogue of our product can do; rows with a pending sum are too many for it.
        fused = activation == "silu" and linear.bias is None and state.pending is None
        weight = kernel_weight(linear)
        config = self._policy.gemm_config(state.residual, weight, gated=True) if fused else None
        if config is not None and not isinstance(weight, GroupedWeight):
            x = self._norm_or_deferred(state, norm)
            return small_m_linear(x, weight, config, workspace=self._workspace, gated=True)
        both = self.norm_linear(state, norm, linear)
        if activation == "silu":
            return silu_mul(both)
        gate, up = both.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def linear_add_norm(self, x: Tensor, linear: Linear, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """Computes product, residual sum and norm: fused for few rows, or overlapped with the all-reduce for many."""
        residual = state.residual  # where a pending sum is added: before the next one begins
        if linear.is_summed:
            peers = self._collectives.peers
            if self._overlaps_sums and peers is not None and peers.overlaps(x.shape[0], linear.out_features, x.dtype):
                return self._overlapped_sum(peers, x, linear, residual, next_norm)
            return self._sum_add_norm(self._summand(x, linear), state, next_norm)
        weight, bias = kernel_weight(linear), linear.bias
        config = self._policy.gemm_config(x, weight)
        if config is not None and not isinstance(weight, GroupedWeight):
            return ResidualState(
                *small_m_linear_add_norm(
                    x,
                    weight,
                    config,
                    workspace=self._workspace,
                    bias=bias,
                    residual=residual,
                    norm_weight=next_norm.weight,
                    eps=next_norm.eps,
                )
            )
        if not isinstance(weight, Tensor):
            return self.add_norm(self.quantized(x, weight, bias), state, next_norm)
        splits = self._policy.k_splits(x.shape[0], *weight.shape)
        if splits > 1:
            summands = split_k_gemm(x, weight, splits)
            if bias is not None:
                summands[0].add_(bias)
            return ResidualState(residual, add_rms_norm(residual, summands, next_norm.weight, next_norm.eps))
        out = residual.addmm_(x, weight.t())  # in place: cuBLAS would copy the residual first
        return ResidualState(out if bias is None else out.add_(bias))

    def linear_norm_add_norm(
        self, x: Tensor, linear: Linear, norm: RMSNorm, state: ResidualState, next_norm: RMSNorm | None
    ) -> ResidualState:
        """Computes the product and its sum over ranks, normalises it, and adds it to the residual stream."""
        if linear.is_summed:
            state = ResidualState(state.residual)  # as in linear_add_norm
            summands, peers = self._summand(x, linear), self._collectives.peers
            sums = self._collectives.all_reduce if peers is None or not peers.can_sum(summands) else peers.sum
            out = sums(summands)
        else:
            out = self._product(ResidualState(x), None, linear)
        return self.add_norm(rms_norm(out, norm.weight, norm.eps), state, next_norm)

    def _overlapped_sum(
        self, peers: "PeerMemory", x: Tensor, linear: Linear, residual: Tensor, next_norm: RMSNorm
    ) -> ResidualState:
        """Adds the sum of both ranks' linear(x) to the residual. Each half is copied as soon as its product is
        computed.
        """
        exchange = peers.begin_overlapped(residual.shape[0], residual.shape[1], residual.dtype)
        for half, rows in enumerate(exchange.halves):
            self._product(ResidualState(x[rows]), None, linear, exchange.summand[rows])
            exchange.send(half)
        normed = torch.empty_like(residual)
        parts = [
            (rows, partial(exchange.add_norm, half, residual[rows], next_norm.weight, next_norm.eps, normed[rows]))
            for half, rows in enumerate(exchange.halves)
        ]
        return ResidualState(residual, PendingSum(normed, parts))

    def _summand(self, x: Tensor, linear: Linear) -> Tensor:
        """Returns this rank's linear(x) [rows, width], in memory that its peers can read if they have to.

        If it will be written to the peers' memory instead, it may be the summands [splits, rows, width] of split-K.
        """
        rows, width, weight = x.shape[0], linear.out_features, kernel_weight(linear)
        if self._pushes(rows, width, x) and isinstance(weight, Tensor) and linear.bias is None:
            splits = self._policy.k_splits(rows, *weight.shape)
            if splits > 1:
                return split_k_gemm(x, weight, splits)
        return self._product(ResidualState(x), None, linear, self._summand_memory(rows, width, x))

    def _pushes(self, rows: int, width: int, like: Tensor) -> bool:
        """True if a rank writes its summand to its peers' memory; the summand itself may then be anywhere."""
        peers = self._collectives.peers
        return peers is not None and peers.pushes(rows, width, like.dtype)

    def _summand_memory(self, rows: int, width: int, like: Tensor) -> Tensor | None:
        """Returns memory where peers can read a summand, or None if it may be anywhere."""
        peers = self._collectives.peers
        return None if peers is None or self._pushes(rows, width, like) else peers.summand(rows, width, like.dtype)

    def _sum_add_norm(self, summands: Tensor, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """Adds the sum of all ranks' summands to the residual, in one kernel if peers can access the summands."""
        peers, residual = self._collectives.peers, state.residual
        if peers is not None and peers.can_sum(summands):
            return ResidualState(residual, peers.sum_add_norm(summands, residual, next_norm.weight, next_norm.eps))
        return self.add_norm(self._collectives.all_reduce(summands), state, next_norm)

    def norm_columns_(self, x: Tensor, columns: slice, norm: RMSNorm) -> None:
        """Normalises the columns, with an all-reduce if a norm spans the columns of several ranks."""
        if norm.columns is not None:
            norm_shared_columns_(x[:, columns], norm, self._collectives)
        else:
            rms_norm(x[:, columns], norm.weight, norm.eps, out=x[:, columns])

    def moe_add_norm(self, state: ResidualState, norm: RMSNorm, moe: SparseMoE, next_norm: RMSNorm) -> ResidualState:
        """Routes, computes the experts, and adds up their results in the kernel that adds the residual."""
        x = self.norm(state, norm)
        summands = self._expert_summands(x, self.norm_linear(ResidualState(state.residual, x), norm, moe.gate), moe)
        if moe.is_summed:
            if moe.shared_experts is None and self._pushes(x.shape[0], x.shape[1], x):
                return self._sum_add_norm(summands, state, next_norm)
            return self._sum_add_norm(self._expert_total(x, summands, moe), state, next_norm)
        self._add_shared_experts(summands[0], x, moe)
        normed = add_rms_norm(state.residual, summands, next_norm.weight, next_norm.eps)
        return ResidualState(state.residual, normed)

    def experts(self, x: Tensor, routed_by: Tensor, moe: SparseMoE) -> Tensor:
        """Routes, computes the experts, and adds up their results."""
        logits = self._product(ResidualState(routed_by), None, moe.gate)
        summands = self._expert_summands(x, logits, moe)
        if moe.is_summed:
            total, peers = self._expert_total(x, summands, moe), self._collectives.peers
            sums = self._collectives.all_reduce if peers is None or not peers.can_sum(total) else peers.sum
            return sums(total)
        self._add_shared_experts(summands[0], x, moe)
        return summands.sum(0)

    def _expert_summands(self, x: Tensor, logits: Tensor, moe: SparseMoE) -> Tensor:
        """Returns the weighed results of each token's experts [choices, tokens, hidden], for the router's logits."""
        spec = moe.spec
        gate_up, down = moe.weights()
        tiles = self._policy.expert_tiles(
            x.shape[0], spec.experts_per_token, spec.num_stacked, x.dtype, is_plain=isinstance(gate_up, Tensor)
        )
        routing = route(
            logits,
            spec.top_k,
            normalizes_top_k=spec.normalizes_top_k,
            groups=tiles is not None and spec.is_gated,
            num_shared=spec.num_shared,
            sigmoid=spec.scoring == "sigmoid",
            scale=spec.scale,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            correction=moe.correction,
            local=None if len(moe.local_experts) == spec.num_stacked else moe.local_experts,
        )
        if not spec.is_gated:
            return self._ungated(x, routing, moe).unsqueeze(0)
        if moe.expert_scale is not None:
            scales = moe.expert_scale[moe.local_experts.start : moe.local_experts.stop]
            routing = replace(routing, weights=routing.weights * scales[routing.experts.clamp(min=0)])
        options: dict[str, Any] = {
            "gate_up_bias": moe.gate_up_bias,
            "down_bias": moe.down_bias,
            "swiglu_limit": spec.swiglu_limit,
            "gelu": spec.activation == "gelu_tanh",
        }
        if isinstance(gate_up, GroupedWeight) and gate_up.kind == "mxfp4":
            assert isinstance(down, GroupedWeight)
            return mx_experts(x, routing, gate_up, down, pdl=self._policy.pdl, **options)
        if tiles is None:
            return expert_gemv(x, routing, gate_up, down, **options)
        return grouped_experts(x, routing, gate_up, down, tiles, **options)

    def _ungated(self, x: Tensor, routing: Routing, moe: SparseMoE) -> Tensor:
        """Returns the sum of experts without gates, whose inputs and outputs may be latents."""
        up, down = moe.weights()
        assert isinstance(up, Tensor), "a start with such experts quantised is refused"
        assert isinstance(down, Tensor)
        inputs = x if moe.latent_in_proj is None else self._product(ResidualState(x), None, moe.latent_in_proj)
        total = ungated_experts(inputs, routing, up, down)
        return total if moe.latent_out_proj is None else self._product(ResidualState(total), None, moe.latent_out_proj)

    def _expert_total(self, x: Tensor, summands: Tensor, moe: SparseMoE) -> Tensor:
        """Returns this rank's summand of a mixture, in memory that its peers can read if they have to."""
        memory = self._summand_memory(x.shape[0], x.shape[1], x)
        total = summands.sum(0) if memory is None else torch.sum(summands, 0, out=memory)
        self._add_shared_experts(total, x, moe)
        return total

    def _add_shared_experts(self, total: Tensor, x: Tensor, moe: SparseMoE) -> None:
        """Adds the experts of every token outside the stacks to `total` in place, if there are any."""
        shared, gate = moe.shared_experts, moe.shared_gate
        if shared is None:
            return
        gated = self.norm_gated_linear(ResidualState(x), None, shared.gate_up_proj, "silu")
        made = self._product(ResidualState(gated), None, shared.down_proj)
        if gate is None:
            total += made
        else:
            add_gated(total, made, x, gate.weight)

    def norm(self, state: ResidualState, norm: RMSNorm | None) -> Tensor:
        """Returns the norm that the last operation has computed, or computes it."""
        if norm is None:
            return state.residual
        normed = state.normed
        return normed if isinstance(normed, Tensor) else rms_norm(state.residual, norm.weight, norm.eps)

    def add_norm(self, x: Tensor, state: ResidualState, next_norm: RMSNorm | None) -> ResidualState:
        """Computes the sum and the norm in one kernel."""
        if next_norm is None:
            return ResidualState(state.residual.add_(x))
        return ResidualState(
            state.residual, add_rms_norm(state.residual, x.unsqueeze(0), next_norm.weight, next_norm.eps)
        )

    def quantized(
        self,
        x: Tensor,
        weight: QuantizedWeight | GroupedWeight,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns x @ weight.T + bias for more rows than our small-M GEMMs take, or where those cannot run."""
        if isinstance(weight, GroupedWeight):
            return grouped_weight_linear(x, weight, bias=bias, out=out)
        int8 = self._policy.int8_gemm_config(x.shape[0], weight)
        if int8 is not None:
            return int8_linear(x, weight, int8, bias=bias, out=out)
        blocks = self._policy.fp8_block_gemm_config(x, weight)
        if blocks is not None:
            return fp8_block_linear(x, weight, blocks, bias=bias, out=out)
        large = self._policy.large_m_config(x, weight)
        if large is not None:
            from mini_infer_engine.kernels.gemm.large_m_gemm import large_m_gemm  # not every Triton has its Gluon

            sm_count = self._policy.profile.sm_count
            return large_m_gemm(x, weight, large, sm_count=sm_count, workspace=self._workspace, bias=bias, out=out)
        config = self._policy.chunk_config(x, weight)
        if config is None:
            scaled_mm = self._policy.uses_scaled_mm(x, weight)
            return quantized_linear(x, weight, scaled_mm=scaled_mm, bias=bias, out=out)
        if out is None:
            out = x.new_empty((x.shape[0], weight.shape[0]))
        for begin in range(0, x.shape[0], MAX_M):
            # All of MAX_M rows, some twice, so that they are one kernel.
            first = max(0, min(begin, x.shape[0] - MAX_M))
            rows = slice(first, first + MAX_M)
            small_m_linear(x[rows], weight, config, workspace=self._workspace, bias=bias, out=out[rows])
        return out

    def _norm_or_deferred(self, state: ResidualState, norm: RMSNorm | None) -> Tensor | DeferredRMSNorm:
        """Returns the input of one of our GEMMs, which can itself divide by the root mean square."""
        return self.norm(state, norm) if norm is None or state.normed is None else state.normed


def kernel_weight(linear: Linear) -> Tensor | QuantizedWeight | GroupedWeight:
    """Returns the weight that kernels multiply with. Fails an assertion if the layer's method has none for a GPU."""
    if linear.method is UNQUANTIZED:
        return linear.weight
    assert isinstance(linear.method, PackedMethod | GroupedMethod), f"{type(linear.method).__name__} has no kernel"
    return linear.method.weight(linear)
