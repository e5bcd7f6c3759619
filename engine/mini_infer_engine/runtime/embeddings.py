"""Computes embeddings: the hidden state of a row's last token after the last norm, L2-normalised.

Last-token pooling is what decoder models that are trained for embeddings are trained with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mini_infer_engine.core.batch import Row
from mini_infer_engine.ops.base import ResidualState


def needs_embeddings(rows: list[Row]) -> bool:
    """Returns True if some of the rows request an embedding."""
    return any(row.embeds for row in rows)


@dataclass(slots=True)
class Embeddings:
    """The embeddings of one pass, being copied to main memory."""

    rows: list[int]
    vectors: Tensor  # [rows, hidden] fp32, in main memory

    @classmethod
    def of(cls, rows: list[Row], state: ResidualState, norm: Callable[[ResidualState], Tensor]) -> Self:
        """Computes the embeddings; `state` has the last token of each row that samples, in order."""
        sampling = [index for index, row in enumerate(rows) if row.sampling is not None]
        embedding_rows = [place for place, index in enumerate(sampling) if rows[index].embeds]
        places = torch.tensor(embedding_rows, dtype=torch.int64, device=state.residual.device)
        vectors = normalize(norm(state.select(places)).float(), dim=-1)
        return cls([sampling[place] for place in embedding_rows], _on_host(vectors))

    def read(self) -> dict[int, bytes]:
        """Returns the embeddings by row, as fp32 numbers in the machine's byte order. The pass must have run."""
        return {row: vector.numpy().tobytes() for row, vector in zip(self.rows, self.vectors, strict=True)}


def _on_host(vectors: Tensor) -> Tensor:
    if not vectors.is_cuda:
        return vectors
    return torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True).copy_(vectors, non_blocking=True)
