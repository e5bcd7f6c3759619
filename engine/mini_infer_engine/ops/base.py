"""The verbs in which models are written: what an architecture's forward may ask of a device.

A model says each of its layers once; `torch_ops` computes the verbs by plain torch, `triton_ops` by our kernels, which
fuse what stands side by side. That is why the verbs are pairs: a norm and the product that reads it, a product and the
sum and norm that follow. What happens between the ranks of a tensor-parallel group happens inside a verb.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mini_infer_engine.config.model_config import Activation
from mini_infer_engine.kernels.gemm.gemm_config import DeferredRMSNorm
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class ResidualState:
    """The residual stream between two blocks."""

    residual: Tensor  # [tokens, hidden]; a verb that adds to it may do so in place
    normed: Tensor | DeferredRMSNorm | None = None
    """What the next norm makes of it, where the last verb has computed that, or begun to, on its way."""

    def select(self, rows: Tensor) -> "ResidualState":
        """Some of its rows [rows] int64, before the next norm."""
        return ResidualState(self.residual.index_select(0, rows))


class AttentionPass(Protocol):
    """Attention of one forward pass, with all that does not depend on the layer already computed."""

    @property
    def logits_indices(self) -> Tensor | None:
        """[rows] int64: the tokens whose logits are asked for; None: all tokens of the pass."""

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Normalise and rotate q and k, write what is cached into the page pool, attend: [tokens, out_width].

        qkv is [tokens, (heads + 2 * kv_heads) * head_dim], q then k then v, and may be overwritten; of a layer with
        latent attention what `LatentAttention` says. The last layer returns [rows of logits_indices, out_width].
        """


class Ops(Protocol):
    """See the module. Every verb takes activations of [tokens, width] in the model's dtype.

    A norm that is None: blocks read the residual stream as it is. In a tensor-parallel group verbs add up what layers
    with `is_summed` compute, and gather logits: activations between verbs are those of the whole model, but for what a
    layer with a rank's rows makes.
    """

    def embed(self, token_ids: Tensor, embedding: Embedding) -> Tensor:
        """Rows of the table [tokens, hidden] for token_ids [tokens] int64, in new memory."""

    def sum_embeddings(self, hidden: Tensor) -> Tensor:
        """All ranks' embeddings, where a kernel has looked up this rank's: what such a pass begins with."""

    def norm_linear(self, state: ResidualState, norm: RMSNorm | None, linear: Linear) -> Tensor:
        """linear(norm(residual)): [tokens, out_features]."""

    def norm_gated_linear(
        self, state: ResidualState, norm: RMSNorm | None, linear: Linear, activation: Activation
    ) -> Tensor:
        """activation(gate) * up, where gate and up are the two halves of linear(norm(residual))."""

    def linear_add_norm(self, x: Tensor, linear: Linear, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """Residual + linear(x), prepared for `next_norm` where that costs nothing."""

    def linear_norm_add_norm(
        self, x: Tensor, linear: Linear, norm: RMSNorm, state: ResidualState, next_norm: RMSNorm | None
    ) -> ResidualState:
        """Residual + norm(linear(x)), for blocks that normalise what they add."""

    def norm_columns_(self, x: Tensor, columns: slice, norm: RMSNorm) -> None:
        """Normalise these columns of x [tokens, width] in place: norms over all heads of q or of k together."""

    def moe_add_norm(self, state: ResidualState, norm: RMSNorm, moe: SparseMoE, next_norm: RMSNorm) -> ResidualState:
        """Residual + moe(norm(residual)), prepared for `next_norm`."""

    def norm(self, state: ResidualState, norm: RMSNorm | None) -> Tensor:
        """The normalised residual stream, for blocks that read it more than once."""

    def logits(self, state: ResidualState, norm: RMSNorm, head: Linear, out: Tensor | None = None) -> Tensor:
        """head(norm(residual)): [rows, vocab], written to `out` where one is given."""

    def add_norm(self, x: Tensor, state: ResidualState, next_norm: RMSNorm | None) -> ResidualState:
        """Residual + x, for blocks that are not one product."""
