"""The verbs in which models are written: what an architecture's forward may ask of a device.

A model says each of its layers once; `torch_ops` computes the verbs by plain torch, `triton_ops` by our kernels, which
fuse what stands side by side. That is why the verbs are pairs: a norm and the product that reads it, a product and the
sum and norm that follow. What happens between the ranks of a tensor-parallel group happens inside a verb, or goes on
from one verb to the next as a `PendingSum`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from mini_infer_engine.config.model.model_config import Activation
from mini_infer_engine.kernels.gemm.gemm_config import DeferredRMSNorm
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.norm import RMSNorm


class PendingSum:
    """A sum of all ranks' summands that is not in the residual stream yet: parts of it are still on their way.

    It is added part by part, in order and each once, so that a product can be computed for the first rows while the
    others come.
    """

    def __init__(self, normed: Tensor, parts: Sequence[tuple[slice, Callable[[], None]]]) -> None:
        """`parts` cover all rows of `normed` [tokens, hidden].

        Each is given with what waits for it, adds it to the residual stream in place, and writes these rows of
        `normed`: what the next norm makes of them.
        """
        self._normed = normed
        self._rows = [rows for rows, _ in parts]
        self._not_added = [add for _, add in parts]

    @property
    def is_added(self) -> bool:
        """All of it."""
        return not self._not_added

    @property
    def num_rows(self) -> int:
        """Of all parts."""
        return self._normed.shape[0]

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their part of what the next norm makes, each added once it is asked for."""
        for number, rows in enumerate(self._rows, start=1):
            self._add(number)
            yield rows, self._normed[rows]

    def finish(self) -> Tensor:
        """Add what has not been added; returns what the next norm makes of all rows."""
        self._add(len(self._rows))
        return self._normed

    def _add(self, number: int) -> None:
        """The first `number` parts."""
        while self._not_added and len(self._rows) - len(self._not_added) < number:
            self._not_added.pop(0)()


class ResidualState:
    """The residual stream between two blocks. Whoever reads it, or its norm, has a pending sum added first."""

    __slots__ = ("_normed", "_residual")

    def __init__(self, residual: Tensor, normed: Tensor | DeferredRMSNorm | PendingSum | None = None) -> None:
        self._residual, self._normed = residual, normed

    @property
    def residual(self) -> Tensor:
        """[tokens, hidden]; a verb that adds to it may do so in place."""
        self._finish()
        return self._residual

    @property
    def normed(self) -> Tensor | DeferredRMSNorm | None:
        """What the next norm makes of it, where the last verb has computed that, or begun to, on its way."""
        return self._finish()

    @property
    def pending(self) -> PendingSum | None:
        """A sum that may be added part by part; None: there is none, or it has been added."""
        normed = self._normed
        return normed if isinstance(normed, PendingSum) and not normed.is_added else None

    def select(self, rows: Tensor) -> "ResidualState":
        """Some of its rows [rows] int64, before the next norm."""
        return ResidualState(self.residual.index_select(0, rows))

    def _finish(self) -> Tensor | DeferredRMSNorm | None:
        if isinstance(self._normed, PendingSum):
            self._normed = self._normed.finish()
        return self._normed


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
