"""Adds features of a vision encoder to the decoder's residual stream (DeepStack, arXiv 2406.04334)."""

from dataclasses import dataclass

from torch import Tensor

from mini_infer_engine.ops.base import ResidualState


@dataclass(frozen=True, slots=True)
class DeepstackFeatures:
    """Features of the vision encoder that are added to the residual stream after the first layers (DeepStack)."""

    tokens: Tensor  # [placeholders] int64, their indexes in the pass
    layers: tuple[Tensor, ...]  # of each layer [placeholders, hidden]

    def add(self, state: ResidualState, layer: int, selected: Tensor | None) -> ResidualState:
        """Returns the state after `layer` with its features; `selected` are the tokens that it has, None for all."""
        residual, features = state.residual, self.layers[layer]
        if selected is None:
            return ResidualState(residual.index_add_(0, self.tokens, features))
        matches = selected[:, None] == self.tokens  # [rows, placeholders]
        return ResidualState(residual + matches.to(features.dtype) @ features)
