"""Defines the operations in which models are written: everything that a model's forward pass requests of a device.

A model states each of its layers once. `torch_ops` implements the operations in plain torch, `triton_ops` with our
kernels, which fuse neighbours. The operations are therefore pairs: a norm and the product that reads it, or a product
and the residual sum and norm that follow. Communication between the ranks of a tensor-parallel group happens inside an
operation, or is carried to the next one as a `PendingSum`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from mini_infer_engine.config.model.model_config import Activation
from mini_infer_engine.kernels.gemm.gemm_config import DeferredRMSNorm
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.gated_delta_net import GatedDeltaNet
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.mamba2 import Mamba2
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.layers.short_convolution import ShortConvolution


class PendingSum:
    """A sum over all ranks that has not been added to the residual stream yet, because parts of it are still in
    transit.

    It is added part by part, in order and each once, so that a product can be computed for the first rows while the
    others arrive.
    """

    def __init__(self, normed: Tensor, parts: Sequence[tuple[slice, Callable[[], None]]]) -> None:
        """Takes `parts` that cover all rows of `normed` [tokens, hidden].

        Each part comes with a function that waits for it, adds it to the residual stream in place, and writes the next
        norm's output to these rows of `normed`.
        """
        self._normed = normed
        self._rows = [rows for rows, _ in parts]
        self._not_added = [add for _, add in parts]

    @property
    def is_added(self) -> bool:
        """True if all parts have been added."""
        return not self._not_added

    @property
    def num_rows(self) -> int:
        """The number of rows in all parts."""
        return self._normed.shape[0]

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows and the next norm's output for them. Each part is added when the iterator reaches it."""
        for number, rows in enumerate(self._rows, start=1):
            self._add(number)
            yield rows, self._normed[rows]

    def finish(self) -> Tensor:
        """Adds the remaining parts, and returns the next norm's output for all rows."""
        self._add(len(self._rows))
        return self._normed

    def _add(self, number: int) -> None:
        """Adds the first `number` parts, if they have not been added yet."""
        while self._not_added and len(self._rows) - len(self._not_added) < number:
            self._not_added.pop(0)()


class ResidualState:
    """The residual stream between two blocks. Reading it, or its norm, first adds a pending sum."""

    __slots__ = ("_normed", "_residual")

    def __init__(self, residual: Tensor, normed: Tensor | DeferredRMSNorm | PendingSum | None = None) -> None:
        self._residual, self._normed = residual, normed

    @property
    def residual(self) -> Tensor:
        """The residual stream [tokens, hidden]; an operation that adds to it may do so in place."""
        self._finish()
        return self._residual

    @property
    def normed(self) -> Tensor | DeferredRMSNorm | None:
        """The next norm's output, complete or deferred, if the last operation has computed it on the side, or None."""
        return self._finish()

    @property
    def pending(self) -> PendingSum | None:
        """The sum that may be added part by part, or None if there is none or it has been added."""
        normed = self._normed
        return normed if isinstance(normed, PendingSum) and not normed.is_added else None

    def select(self, rows: Tensor) -> "ResidualState":
        """Returns the state of the rows [rows] int64, without the next norm's output."""
        return ResidualState(self.residual.index_select(0, rows))

    def _finish(self) -> Tensor | DeferredRMSNorm | None:
        if isinstance(self._normed, PendingSum):
            self._normed = self._normed.finish()
        return self._normed


class AttentionPass(Protocol):
    """Attention of one forward pass, with everything that does not depend on the layer precomputed."""

    @property
    def logits_indices(self) -> Tensor | None:
        """The tokens whose logits are requested, [rows] int64, or None for all tokens of the pass."""

    @property
    def positions(self) -> Tensor:
        """The position of each token in its text, [tokens], for models that rotate queries and keys themselves."""

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Normalises and rotates q and k, writes keys and values to the page pool, and attends: [tokens, out_width].

        qkv is [tokens, (heads + 2 * kv_heads) * head_dim], q then k then v, and may be overwritten. `LatentAttention`
        documents its layout for latent attention. The last layer returns [rows of logits_indices, out_width].
        """


class RecurrentPass(AttentionPass, Protocol):
    """An `AttentionPass` of a model that also has layers with a recurrent state.

    Each row of the pass goes on from its sequence's state, and leaves there the state after its tokens.
    """

    def gated_delta_net(self, projected: tuple[Tensor, Tensor], block: GatedDeltaNet) -> Tensor:
        """Maps the outputs of the block's products [tokens, ...] to the input of `out_proj`, by sequence."""

    def mamba2(self, projected: Tensor, block: Mamba2) -> Tensor:
        """Maps the output of `in_proj` [tokens, ...] to the input of `out_proj`, by sequence."""

    def short_convolution(self, projected: Tensor, block: ShortConvolution) -> Tensor:
        """Maps the output of `in_proj` [tokens, ...] to the input of `out_proj`, by sequence."""


class Ops(Protocol):
    """The operations in which models are written. Each takes activations [tokens, width] in the model's dtype.

    If a norm is None, the block reads the residual stream without one. In a tensor-parallel group the operations sum
    the results of layers with `is_summed`, and gather logits. Activations between operations are those of the whole
    model, except for the output of a layer with a rank's rows.
    """

    def embed(self, token_ids: Tensor, embedding: Embedding) -> Tensor:
        """Returns the embeddings [tokens, hidden] of token_ids [tokens] int64, in new memory."""

    def sum_embeddings(self, hidden: Tensor) -> Tensor:
        """Sums the embeddings of all ranks, where a kernel has looked up this rank's: the first operation of such a
        pass.
        """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x, which may be overwritten: for models whose products are not ours."""

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """Returns the first `width` columns of all ranks' x [rows, columns], for such models."""

    def norm_linear(self, state: ResidualState, norm: RMSNorm | None, linear: Linear) -> Tensor:
        """Returns linear(norm(residual)): [tokens, out_features]."""

    def norm_gated_linear(
        self, state: ResidualState, norm: RMSNorm | None, linear: Linear, activation: Activation
    ) -> Tensor:
        """Returns activation(gate) * up, where gate and up are the two halves of linear(norm(residual))."""

    def linear_add_norm(self, x: Tensor, linear: Linear, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """Returns residual + linear(x), prepared for `next_norm` if that is free."""

    def linear_norm_add_norm(
        self, x: Tensor, linear: Linear, norm: RMSNorm, state: ResidualState, next_norm: RMSNorm | None
    ) -> ResidualState:
        """Returns residual + norm(linear(x)), for blocks that normalise their output."""

    def norm_columns_(self, x: Tensor, columns: slice, norm: RMSNorm) -> None:
        """Normalises these columns of x [tokens, width] in place: a norm over all heads of q or of k together."""

    def moe_add_norm(self, state: ResidualState, norm: RMSNorm, moe: SparseMoE, next_norm: RMSNorm) -> ResidualState:
        """Returns residual + moe(norm(residual)), prepared for `next_norm` if that is free."""

    def experts(self, x: Tensor, routed_by: Tensor, moe: SparseMoE) -> Tensor:
        """Returns moe(x) [tokens, hidden], whose experts are chosen by the router's logits for `routed_by`."""

    def norm(self, state: ResidualState, norm: RMSNorm | None) -> Tensor:
        """Returns the normalised residual stream, for blocks that read it more than once."""

    def logits(self, state: ResidualState, norm: RMSNorm, head: Linear, out: Tensor | None = None) -> Tensor:
        """Returns head(norm(residual)): [rows, vocab], written to `out` if one is given."""

    def add_norm(self, x: Tensor, state: ResidualState, next_norm: RMSNorm | None) -> ResidualState:
        """Returns residual + x, for blocks that are more than one product."""
