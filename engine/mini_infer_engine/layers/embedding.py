"""Stores the token embeddings, or a rank's shard of them: in the model's dtype, rounded after loading, or in groups of
integers that a checkpoint has.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.parallelism.tensor_parallel import ALONE, TensorParallel
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, dequantized_groups
from mini_infer_engine.layers.placement import Part, Placement

_NOTHING = torch.empty(0)


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
        self.width = width
        self._decode: Callable[[Tensor], GroupedWeight] | None = None
        self._form: GroupedWeight | None = None  # without tensors, which are parameters
        self.register_parameter("group_scales", None)
        self.register_parameter("group_zeros", None)

    def read_blocks(self, row_bytes: int, decode: Callable[[Tensor], GroupedWeight]) -> None:
        """Has the table loaded as bytes [rows, row_bytes], which `decode` makes groups of integers once they are there.

        Call it before anything is loaded.
        """
        self.weight = nn.Parameter(torch.empty(len(self.weight), row_bytes, dtype=torch.uint8), requires_grad=False)
        self._decode = decode

    @property
    def has_groups(self) -> bool:
        """True if the table is or will be groups of integers, which `groups` returns."""
        return self._decode is not None

    @property
    def groups(self) -> GroupedWeight:
        """The table as groups of integers, once it is loaded."""
        assert self._form is not None, "`finish_loading` makes them"
        return replace(self._form, values=self.weight, scales=self.group_scales, zeros=self.group_zeros)

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
        """Rounds the table, once, if `rounding` is set, or decodes its bytes."""
        if self._decode is not None and self._form is None:
            if self.rows is not None:
                self.weight.data[self.rows.count :] = 0  # padding
            made = self._decode(self.weight.data)
            self._form = replace(made, values=_NOTHING, scales=_NOTHING, zeros=None)
            self.weight = nn.Parameter(made.values, requires_grad=False)
            self.group_scales = nn.Parameter(made.scales, requires_grad=False)
            self.group_zeros = None if made.zeros is None else nn.Parameter(made.zeros, requires_grad=False)
        if self.rounding is not None and self.scales is None:
            integers, scales = self.rounding(self.weight)
            self.weight = nn.Parameter(integers, requires_grad=False)
            self.scales = nn.Parameter(scales.view(-1), requires_grad=False)

    def _rows(self, places: Tensor) -> Tensor:
        if self._form is not None:
            return dequantized_groups(self.groups.at(places)).to(self.dtype)
        found = functional.embedding(places, self.weight)
        if self.scales is None:
            return found
        return found.float().mul_(self.scales[places].unsqueeze(-1)).to(self.dtype)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Maps token ids [tokens] int64 to embeddings [tokens, width], in new memory."""
        return self._rows(token_ids) if self.rows is None else self.rows_or_zeros(token_ids)

    def rows_or_zeros(self, token_ids: Tensor) -> Tensor:
        """Maps token ids [tokens] int64 to embeddings [tokens, width]; zeros for tokens that this rank, or the table,
        has not.
        """
        local = token_ids - self.first_token
        is_here = (local >= 0) & (local < (len(self.weight) if self.rows is None else self.rows.count))
        return self._rows(local.where(is_here, 0)).masked_fill_(~is_here.unsqueeze(-1), 0)
