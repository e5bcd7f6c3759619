"""The table of token embeddings, or a rank's tokens of it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.distributed.tensor_parallel import ALONE, TensorParallel
from mini_infer_engine.layers.placement import Part, Placement


class Embedding(nn.Module):
    """A row of the table for each token; zeros for tokens of other ranks, so that the ranks' sum is the embedding."""

    def __init__(self, num_rows: int, width: int, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.rows = parallel.vocabulary(num_rows) if parallel.size > 1 else None
        """Tokens of this rank; None: all."""
        rows = parallel.vocabulary_rows(num_rows)  # the last ones may be padding
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=False)

    @property
    def first_token(self) -> int:
        """Of this rank."""
        return 0 if self.rows is None else self.rows.ranges[0][0]

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Checkpoint names to the memory they fill."""
        if self.rows is None:
            return {f"{path}.weight": Placement(self.weight)}
        return {f"{path}.weight": Placement(self.weight[: self.rows.count], part=Part(0, self.rows))}

    def forward(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 to [tokens, width], in new memory."""
        if self.rows is None:
            return functional.embedding(token_ids, self.weight)
        local = token_ids - self.first_token
        is_here = (local >= 0) & (local < self.rows.count)
        return functional.embedding(local.where(is_here, 0), self.weight).masked_fill_(~is_here.unsqueeze(-1), 0)
