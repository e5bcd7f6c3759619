"""Defines linear layers: several of the checkpoint's tensors in one weight, stored and computed by the layer's method.

The names of a method's parts are vLLM's (`create_weights`, `process_weights_after_loading`, `apply`).
"""

import os
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.parallelism.tensor_parallel import Shard, TensorParallel
from mini_infer_engine.layers.placement import Part, Placement


class LinearMethod(Protocol):
    """Stores a layer's weight, and multiplies with it."""

    def create_weights(self, layer: "Linear") -> None:
        """Registers the layer's parameters for its `out_features` and `in_features`, uninitialised."""

    def placements(self, layer: "Linear", path: str, rows: slice) -> dict[str, Placement]:
        """Maps checkpoint names to the memory of some of the layer's rows; `path` is the checkpoint's name of those."""

    def process_weights_after_loading(self, layer: "Linear") -> None:
        """Brings the loaded tensors into the form that is computed with; may be called twice."""

    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        """Returns x @ weight.T + bias by plain torch, [tokens, in_features] to [tokens, out_features]."""


class UnquantizedMethod:
    """Stores weights in the model's dtype; on a CPU in oneDNN's blocked order, if available."""

    def create_weights(self, layer: "Linear") -> None:
        """Registers the weight in the model's dtype."""
        layer.weight = nn.Parameter(torch.empty(layer.out_features, layer.in_features), requires_grad=False)

    def placements(self, layer: "Linear", path: str, rows: slice) -> dict[str, Placement]:
        """Maps the checkpoint's weight to these rows of the layer."""
        return {f"{path}.weight": Placement(layer.weight[rows], expand=layer.row_order(rows), part=layer.part(rows))}

    def process_weights_after_loading(self, layer: "Linear") -> None:
        """Replaces the weight on a CPU by a copy in blocked order; placements have no meaning afterwards."""
        if layer.blocked is None and (blocked := blocked_weight(layer.weight)) is not None:
            layer.blocked = blocked
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        """Multiplies with the blocked weight if there is one, else with the plain weight."""
        if layer.blocked is not None:
            return blocked_linear(x, layer.blocked, layer.bias)
        return functional.linear(x, layer.weight, layer.bias)


UNQUANTIZED = UnquantizedMethod()


class Linear(nn.Module):
    """Computes x @ weight.T + bias, with uninitialised weights: a loader fills them and calls `finish_loading`.

    In a tensor-parallel group it may have some of the checkpoint's rows (column-parallel in Megatron's terms, whose
    weights are transposed), or some of its columns (row-parallel). In the latter case the ranks' results must be
    summed, which the operations of `ops` do, and only the first rank adds the bias.
    """

    weight: nn.Parameter  # [out_features, in_features]
    weight_scale: nn.Parameter  # of methods that scale weights
    weight_minimum: nn.Parameter  # of asymmetric ones
    weight_factors: nn.Parameter  # of methods whose scales have a scale
    integers: nn.Parameter  # of methods that round weights when they are loaded

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        rows: Shard | None = None,
        columns: Shard | None = None,
        adds_bias: bool = True,
    ) -> None:
        """Takes this rank's `in_features` and `out_features`.

        `rows` or `columns` are the checkpoint's rows or columns that this rank has; None: all. `adds_bias` is False on
        ranks whose results are added to those of a rank that adds the bias.
        """
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.rows, self.columns = rows, columns
        self._adds_bias = adds_bias
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.blocked: Tensor | None = None
        self.use(UNQUANTIZED)

    @classmethod
    def borrowing(cls, weight: nn.Parameter, rows: Shard | None = None) -> "Linear":
        """Returns a layer over a weight [out_features, in_features] that another module owns and continues to use."""
        linear = cls(0, 0, rows=rows)
        linear.out_features, linear.in_features = weight.shape
        linear.weight = weight
        linear.blocked = blocked_weight(weight)
        return linear

    @property
    def is_summed(self) -> bool:
        """True if the layer computes a summand: the ranks' results must be summed."""
        return self.columns is not None

    def part(self, rows: slice) -> Part | None:
        """Returns the part of one checkpoint weight that these rows of the layer are, or None for all of it."""
        if self.columns is not None:
            return Part(1, self.columns)
        shard = self._rows_of(rows)
        return None if shard is None else Part(0, shard)

    def _rows_of(self, rows: slice) -> Shard | None:
        """Returns the rows of a checkpoint layer that are at these rows of this layer, or None for all its rows."""
        del rows  # a plain layer is one of the checkpoint's
        return self.rows

    def row_order(self, rows: slice) -> Callable[[Tensor], Tensor] | None:
        """Returns the function that brings a rank's rows of a checkpoint's tensor into this layer's order; None: they
        are in it.
        """
        del rows  # layers with an order of their own may have one for each part
        return None

    def use(self, method: LinearMethod) -> None:
        """Stores and computes by this method from now on. Call it before anything is loaded."""
        self.method: LinearMethod = method
        method.create_weights(self)

    def finish_loading(self) -> None:
        """Brings the loaded weight into the form that is computed with; may be called twice."""
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [tokens, in_features] to [tokens, out_features]."""
        return self.method.apply(self, x)

    def checkpoint_parts(self, path: str) -> dict[str, slice]:
        """Returns the checkpoint's layers that make up this one, by name, with their rows; `path` is its own name."""
        rows = self.out_features if self.rows is None else self.rows.count  # what is left over is padding
        return {path: slice(0, rows)}

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps checkpoint names to the memory that they fill."""
        placements: dict[str, Placement] = {}
        for name, rows in self.checkpoint_parts(path).items():
            placements |= self.method.placements(self, name, rows)
            if self.bias is not None:
                placements[f"{name}.bias"] = self._bias_placement(self.bias, rows)
        return placements

    def _bias_placement(self, bias: Tensor, rows: slice) -> Placement:
        shard = self._rows_of(rows)
        expand = self.row_order(rows) if self._adds_bias else torch.zeros_like
        return Placement(bias[rows], expand=expand, part=None if shard is None else Part(0, shard))


class PackedLinear(Linear):
    """Several linear layers of one input, whose outputs are side by side in the order of `parts`."""

    def __init__(self, in_features: int, parts: Mapping[str, int | Shard], *, bias: bool = False) -> None:
        """Takes the rows of each layer in `parts`, all of them or a rank's shard."""
        counts = {name: part.count if isinstance(part, Shard) else part for name, part in parts.items()}
        self._shards: dict[int, Shard] = {}  # by the first row here
        begin = 0
        for part, count in zip(parts.values(), counts.values(), strict=True):
            if isinstance(part, Shard):
                self._shards[begin] = part
            begin += count
        super().__init__(in_features, begin, bias=bias)
        self.parts = counts

    def _rows_of(self, rows: slice) -> Shard | None:
        shard = self._shards.get(rows.start)
        return None if shard is None or shard.count == shard.total else shard

    def checkpoint_parts(self, path: str) -> dict[str, slice]:
        """Maps each part's own name, as a sibling of this layer, to its rows of the packed weight."""
        parent = path.rpartition(".")[0]
        found, begin = {}, 0
        for part, rows in self.parts.items():
            found[f"{parent}.{part}"] = slice(begin, begin + rows)
            begin += rows
        return found


def column_parallel(in_features: int, rows: Shard, *, bias: bool = False) -> Linear:
    """Returns a layer of which each rank has some of the checkpoint's rows; the input is whole on all ranks."""
    return Linear(in_features, rows.count, bias=bias, rows=rows if rows.count < rows.total else None)


def row_parallel(in_features: int, out_features: int, parallel: TensorParallel, *, bias: bool = False) -> Linear:
    """Returns a layer of which each rank has an equal share of the columns, for inputs that are sharded like them."""
    if parallel.size == 1:
        return Linear(in_features, out_features, bias=bias)
    columns = parallel.even(in_features)
    return Linear(columns.count, out_features, bias=bias, columns=columns, adds_bias=parallel.rank == 0)


MAX_PRIMITIVES = 128
"""The number of compiled products that oneDNN caches, 260 kB each, one for each weight's shape and number of rows."""
_PRIMITIVE_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Environment variables that torch's ideep and oneDNN read at their first use, each for a cache of its own."""


def blocked_weight(weight: Tensor) -> Tensor | None:
    """Returns the weight in oneDNN's order for small batches, or None if that gains nothing or there is no oneDNN.

    Without it every product of a decode step reorders the whole weight: 1.7 times the time at 16 tokens (8 layers of
    width 256, AMD EPYC, torch 2.13). torch has these operators only for its own compiled graphs, hence the check.
    oneDNN reorders elements of two bytes only if the processor has instructions for them (AVX-512).
    """
    operators = torch.ops.mkldnn
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if weight.device.type != "cpu" or not available or not hasattr(operators, "_linear_pointwise"):
        return None
    if weight.dtype == torch.bfloat16 and not operators._is_mkldnn_bf16_supported():
        return None
    if weight.dtype == torch.float16 and not operators._is_mkldnn_fp16_supported():
        return None
    for name in _PRIMITIVE_CACHES:
        os.environ.setdefault(name, str(MAX_PRIMITIVES))
    blocked: Tensor = operators._reorder_linear_weight(weight)
    return blocked


def blocked_linear(x: Tensor, blocked: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `functional.linear` with a weight from `blocked_weight`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, bias, "none", [], "")
    return out
