"""Shards a stack of experts: by their width, or so that each rank has some of them whole."""

from collections.abc import Mapping

from torch import Tensor, nn

from mini_infer_engine.layers.placement import Part
from mini_infer_engine.models.transformers_backend.errors import UnsupportedError
from mini_infer_engine.models.transformers_backend.sharding.forwards import own_experts, summed
from mini_infer_engine.models.transformers_backend.sharding.parameters import ParameterCuts
from mini_infer_engine.models.transformers_backend.sharding.plan import STACKED, WHOLE_EXPERTS

_GROUPED_STEP = 8
"""Columns of an expert's weight are a multiple of this: `torch.nn.functional.grouped_mm` needs rows of 16 bytes."""
_IGNORES_OTHER_EXPERTS = ("grouped_mm", "batched_mm")
"""Implementations of experts that take the number of experts as the index of one that is elsewhere."""


def shard_experts(cuts: ParameterCuts, name: str, module: nn.Module, kinds: Mapping[str, str]) -> None:
    """Shards the stacked weights of `kinds`, by name, and has the ranks sum their outputs.

    Raises:
        UnsupportedError: the plan leaves some weights whole, or the ranks cannot divide them.
    """
    parameters = dict(module.named_parameters(recurse=False))
    if whole := sorted(parameters.keys() - kinds.keys()):
        raise UnsupportedError(f"its plan leaves {name}.{whole[0]} whole, which the ranks would add several times")
    parts = {own: _part(cuts, f"{name}.{own}", parameters[own], kind) for own, kind in kinds.items()}
    for own, part in parts.items():
        cuts.cut(name, module, own, part)
    if WHOLE_EXPERTS not in kinds.values():
        _check_widths(name, module)
        module.forward = summed(module.forward)
        return
    if set(kinds.values()) != {WHOLE_EXPERTS}:
        raise UnsupportedError(f"its plan has some weights of {name} whole, and parts of others")
    experts = parts[min(parts)].shard
    module.num_experts = experts.count  # type: ignore[assignment]  # mypy takes attributes of modules for tensors
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    elsewhere = experts.count if implementation in _IGNORES_OTHER_EXPERTS else 0
    module.forward = summed(own_experts(module.forward, experts.ranges[0], elsewhere))


def _part(cuts: ParameterCuts, name: str, parameter: Tensor, kind: str) -> Part:
    """Returns the rank's part of a stack of weights [experts, rows, columns]."""
    if kind not in STACKED or parameter.ndim < 3:
        raise UnsupportedError(f"its plan cuts {name}, which is no stack of experts, by {kind}")
    dim, count = STACKED[kind]
    dim %= parameter.ndim
    return Part(dim, cuts.share(f"the size of {name}", parameter.shape[dim], count))


def _check_widths(name: str, module: nn.Module) -> None:
    """Raises UnsupportedError if rows of the rank's experts are too narrow for grouped products."""
    for own, parameter in module.named_parameters(recurse=False):
        if parameter.shape[-1] % _GROUPED_STEP:
            raise UnsupportedError(
                f"rows of {name}.{own} would have {parameter.shape[-1]} columns on a rank, and products of experts "
                f"need a multiple of {_GROUPED_STEP}: choose another tensor_parallel_size, or enable_expert_parallel"
            )
