"""Stores the token embeddings, or a rank's shard of them, in the model's dtype or rounded after loading."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.parallelism.tensor_parallel import ALONE, TensorParallel
from mini_infer_engine.layers.placement import Part, Placement


class Embedding(nn.Module):
    """Looks up a row for each token; zeros for tokens of other ranks, so that the ranks' sum is the embedding."""

    def __init__(self, num_rows: int, width: int, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.rows = parallel.vocabulary(num_rows) if parallel.size > 1 else None
        """The tokens of this rank; None: all."""
        rows = parallel.vocabulary_rows(num_rows)  # the last ones may be padding
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=False)
        self.dtype = self.weight.dtype
        """The dtype of the embeddings that the layer returns."""
        self.rounding: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        """Splits the weight into integers and scales [rows, 1], whose product it is; None: the weight is not rounded.
        """
        self.scales: nn.Parameter | None = None  # [rows] fp32, once it has been rounded

    @property
    def first_token(self) -> int:
        """The first token of this rank."""
        return 0 if self.rows is None else self.rows.ranges[0][0]

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps checkpoint names to the memory that they fill."""
        if self.rows is None:
            return {f"{path}.weight": Placement(self.weight)}
        return {f"{path}.weight": Placement(self.weight[: self.rows.count], part=Part(0, self.rows))}

    def finish_loading(self) -> None:
        """Rounds the table, once, if `rounding` is set."""
        if self.rounding is not None and self.scales is None:
            integers, scales = self.rounding(self.weight)
            self.weight = nn.Parameter(integers, requires_grad=False)
            self.scales = nn.Parameter(scales.view(-1), requires_grad=False)

    def _rows(self, places: Tensor) -> Tensor:
        found = functional.embedding(places, self.weight)
        if self.scales is None:
            return found
        return found.float().mul_(self.scales[places].unsqueeze(-1)).to(self.dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Maps token ids [tokens] int64 to embeddings [tokens, width], in new memory."""
        if self.rows is None:
            return self._rows(token_ids)
        local = token_ids - self.first_token
        is_here = (local >= 0) & (local < self.rows.count)
        return self._rows(local.where(is_here, 0)).masked_fill_(~is_here.unsqueeze(-1), 0)
