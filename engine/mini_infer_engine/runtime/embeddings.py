"""Collects the pooled results of one pass: the embedding or the scores of each row that requests them.

Last-token pooling is what decoder models that are trained for embeddings or scores are trained with.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.ops.base import Ops, ResidualState
from mini_infer_engine.runtime.pooler import Pooler


def needs_embeddings(rows: list[Row]) -> bool:
    """Returns True if some of the rows request an embedding or scores."""
    return any(row.embeds for row in rows)


@dataclass(slots=True)
class Embeddings:
    """The pooled results of one pass, being copied to main memory."""

    rows: list[int]
    vectors: Tensor  # [rows, size] fp32, in main memory

    @classmethod
    def of(cls, rows: list[Row], state: ResidualState, model: CausalModel, ops: Ops, pooler: Pooler) -> Self:
        """Computes the results; `state` has the last token of each row that samples, in order."""
        sampling = [index for index, row in enumerate(rows) if row.sampling is not None]
        embedding_rows = [place for place, index in enumerate(sampling) if rows[index].embeds]
        places = torch.tensor(embedding_rows, dtype=torch.int64, device=state.residual.device)
        pooled = state.select(places)
        vectors = pooler(lambda: model.hidden(ops, pooled), lambda: model.logits(ops, pooled))
        return cls([sampling[place] for place in embedding_rows], _on_host(vectors))

    def read(self) -> dict[int, bytes]:
        """Returns the results by row, as fp32 numbers in the machine's byte order. The pass must have run."""
        return {row: vector.numpy().tobytes() for row, vector in zip(self.rows, self.vectors, strict=True)}


def _on_host(vectors: Tensor) -> Tensor:
    if not vectors.is_cuda:
        return vectors
    return torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True).copy_(vectors, non_blocking=True)
