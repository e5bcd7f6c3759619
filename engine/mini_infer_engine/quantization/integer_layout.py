"""Describes how checkpoints lay out integer layers: shapes of tensors, and the part of each that a rank loads.

Knows nothing of the integers' meaning: `integer` decodes them.
"""

from dataclasses import dataclass
from math import gcd

import torch

from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.config.quantization.integer import IntegerScheme
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.placement import Part

WORD_BITS = 32
_LEAST_COLUMNS = 32
"""The fewest columns of a group that a rank may get where ranks cut groups.

With fewer, scales would take as much memory as integers.
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """The dimension of a tensor along which the layer's rows, or its columns, lie."""

    dim: int
    together: int = 1
    """Rows or columns of the layer in one element: those packed in a word, or those of a group."""
    unit: str = "words"
    """The name of such an element in error messages."""
    cut_at: int = 0
    """Ranks may cut elements at multiples of this many rows or columns, and both then load the element; 0: they may
    not.
    """

    def shard(self, rows_or_columns: str, shard: Shard) -> Shard:
        """Returns the elements that store some of the layer's rows or columns. Raises ValueError if those cut through
        elements.
        """
        total, together = shard.total, self.together
        for begin, end in shard.ranges:
            if any(edge % (self.cut_at or together) and edge != total for edge in (begin, end)):
                raise ValueError(
                    f"a rank's {rows_or_columns} {begin} to {end} of {total} cut through {self.unit} of {together}: "
                    "use another --tensor-parallel-size"
                )
        # The last rank's part of a head may be empty, behind all rows.
        stored = ((begin // together if begin < end else -(-begin // together), end) for begin, end in shard.ranges)
        return Shard(-(-total // together), tuple((first, -(-end // together)) for first, end in stored))


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The layout of one tensor of one of the checkpoint's layers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Axis | None = None
    """The axis along which rows are sharded. None: each rank with some of the rows loads the whole tensor."""
    columns: Axis | None = None
    """The axis along which columns are sharded. None: each rank with some of the columns loads the whole tensor."""
    other_shapes: tuple[tuple[int, ...], ...] = ()
    """Other shapes that the checkpoint's tensor may have."""

    def stored(self, part: Part | None) -> Part | None:
        """Returns the part of this tensor that stores a part of the weight, or None for all of it.

        Raises ValueError if the part cuts through words.
        """
        if part is None:
            return None
        axis, name = ((self.rows, "rows"), (self.columns, "columns"))[part.dim]
        return None if axis is None else Part(axis.dim, axis.shard(name, part.shard))

    def stored_shape(self, part: Part | None) -> tuple[int, ...]:
        """Returns the shape of the part that `stored` returns."""
        stored = self.stored(part)
        if stored is None:
            return self.shape
        return (*self.shape[: stored.dim], stored.shard.count, *self.shape[stored.dim + 1 :])


def layouts(scheme: IntegerScheme, layer: Linear, rows: slice) -> dict[str, TensorLayout]:
    """Returns the layouts, by name, of the checkpoint's tensors for its layer at these rows, of which a rank may load a
    part.

    Raises ValueError if the sizes do not fit the scheme.
    """
    part, here = layer.part(rows), (rows.stop - rows.start, layer.in_features)
    num_rows, num_columns = here if part is None else part.whole_shape(here)
    if scheme.form in ("gptq", "awq"):
        return _transposed(scheme, num_rows, num_columns)
    return _by_row(scheme, num_rows, num_columns)


def num_groups(scheme: IntegerScheme, columns: int) -> int:
    """Returns the number of groups in a row of this many columns."""
    return -(-columns // (scheme.group_size or columns))


def group_size(scheme: IntegerScheme, layer: Linear) -> int:
    """Returns the number of columns that share a scale; 0: the whole row.

    On a rank it is smaller than in the checkpoint if ranks cut groups.
    """
    size, columns = scheme.group_size, layer.columns
    if columns is None or not size or _groups_axis(scheme, columns.total, 0) is None:
        return size
    return gcd(size, *(edge for both in columns.ranges for edge in both if edge != columns.total))


def _by_row(scheme: IntegerScheme, rows: int, columns: int) -> dict[str, TensorLayout]:
    """Returns the layouts of compressed-tensors."""
    groups, groups_axis = num_groups(scheme, columns), _groups_axis(scheme, columns, 1)
    one = ((1,), (1, 1)) if scheme.tensor_scale else ()
    wide = (*one, *(((rows,),) if groups == 1 else ()))
    scale = TensorLayout((rows, groups), torch.float32, Axis(0), groups_axis, wide)
    index = {"weight_g_idx": TensorLayout((columns,), torch.int32, None, Axis(0))} if scheme.act_order else {}
    if scheme.form == "int-quantized":
        zero = TensorLayout((rows, groups), torch.int8, Axis(0), groups_axis, wide)
        zeros = {} if scheme.symmetric else {"weight_zero_point": zero}
        return {
            "weight": TensorLayout((rows, columns), torch.int8, Axis(0), Axis(1)),
            "weight_scale": scale,
            **zeros,
            **index,
        }
    in_a_word = WORD_BITS // scheme.bits
    words = TensorLayout((rows, -(-columns // in_a_word)), torch.int32, Axis(0), Axis(1, in_a_word))
    zero = TensorLayout((-(-rows // in_a_word), groups), torch.int32, Axis(0, in_a_word), groups_axis)
    zeros = {} if scheme.symmetric else {"weight_zero_point": zero}
    return {"weight_packed": words, "weight_scale": scale, **zeros, **index}


def _transposed(scheme: IntegerScheme, rows: int, columns: int) -> dict[str, TensorLayout]:
    """Returns the layouts of GPTQ, which packs columns, and of AWQ, which packs rows; both pack rows of zero points."""
    in_a_word, groups = WORD_BITS // scheme.bits, num_groups(scheme, columns)
    if rows % in_a_word or columns % in_a_word:
        raise ValueError(f"{rows} x {columns} weights are not made of words of {in_a_word} integers")
    packed_rows, groups_axis = Axis(1, in_a_word), _groups_axis(scheme, columns, 0)
    words = (
        TensorLayout((columns // in_a_word, rows), torch.int32, Axis(1), Axis(0, in_a_word))
        if scheme.form == "gptq"
        else TensorLayout((columns, rows // in_a_word), torch.int32, packed_rows, Axis(0))
    )
    found = {"qweight": words, "scales": TensorLayout((groups, rows), torch.float32, Axis(1), groups_axis)}
    if not scheme.symmetric:
        found["qzeros"] = TensorLayout((groups, rows // in_a_word), torch.int32, packed_rows, groups_axis)
    if scheme.act_order:
        found["g_idx"] = TensorLayout((columns,), torch.int32, None, Axis(0))
    return found


def _groups_axis(scheme: IntegerScheme, columns: int, dim: int) -> Axis | None:
    """Returns the axis of the groups, or None if a rank's columns may belong to any group: with one group, or by
    act-order.
    """
    if scheme.act_order or num_groups(scheme, columns) == 1:
        return None
    size = scheme.group_size
    return Axis(dim, size, "groups", 0 if size % _LEAST_COLUMNS else _LEAST_COLUMNS)
