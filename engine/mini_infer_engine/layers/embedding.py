"""The table of token embeddings."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embedding(nn.Module):
    """A row of the table for each token."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 to [tokens, width], in new memory."""
        return functional.embedding(token_ids, self.weight)
