"""Shards a linear layer by its columns or its rows."""

from typing import Any

from torch import nn

from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.layers.placement import Part
from mini_infer_engine.models.transformers_backend.errors import UnsupportedError
from mini_infer_engine.models.transformers_backend.sharding.forwards import gathered, own_columns, summed
from mini_infer_engine.models.transformers_backend.sharding.parameters import ParameterCuts
from mini_infer_engine.models.transformers_backend.sharding.plan import COLUMNS, GATHERS, ROWS, SPLITS


def is_linear(module: nn.Module | None) -> bool:
    """Returns True if a product and a bias are all that the module computes."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def shard_linear(cuts: ParameterCuts, name: str, module: nn.Module, kind: str, rows: Shard | None = None) -> None:
    """Shards a layer as its plan says. `rows` are the outputs of the rank, None for an equal share.

    Raises:
        UnsupportedError: the module is none of torch's linear layers, or cannot be divided like this.
    """
    if not is_linear(module):
        raise UnsupportedError(f"its plan cuts {name}, which is a {type(module).__name__}, by {kind}")
    if kind in ROWS:
        _shard_rowwise(cuts, name, module, kind)
    elif kind in COLUMNS:
        _shard_colwise(cuts, name, module, kind, rows)
    else:
        raise UnsupportedError(f"its plan cuts the linear layer {name} by {kind}")


def _shard_rowwise(cuts: ParameterCuts, name: str, module: Any, kind: str) -> None:
    """Divides the inputs: the ranks sum their outputs."""
    columns = cuts.share(f"the columns of {name}", module.in_features)
    cuts.cut(name, module, "weight", Part(1, columns))
    if module.bias is not None:
        cuts.leave_to_first(name, module, "bias")
    module.in_features = columns.count
    forward = summed(module.forward)
    module.forward = own_columns(forward, columns) if kind in SPLITS else forward


def _shard_colwise(cuts: ParameterCuts, name: str, module: Any, kind: str, rows: Shard | None) -> None:
    """Divides the outputs, which the ranks gather if the plan says so."""
    total, count = module.out_features, 2 if kind == "packed_colwise" else 1
    rows = rows or cuts.share(f"the rows of {name}", total, count)
    for own, _ in list(module.named_parameters(recurse=False)):
        cuts.cut(name, module, own, Part(0, rows))
    module.out_features = rows.count
    if kind in GATHERS:
        module.forward = gathered(module.forward, total)
