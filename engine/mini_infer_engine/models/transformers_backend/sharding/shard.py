"""Shards a model of transformers among the ranks of a tensor-parallel group, by the model's own plan.

transformers' own runtime for such plans (`distributed.tensor_parallel`) needs DTensors and loads by `from_pretrained`.
Here parameters are cut before they have memory, and modules communicate by `ops`, as models of ours do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mini_infer_engine.config.parallelism.tensor_parallel import Shard, TensorParallel
from mini_infer_engine.layers.placement import Part
from mini_infer_engine.models.transformers_backend.errors import UnsupportedError
from mini_infer_engine.models.transformers_backend.sharding.experts import shard_experts
from mini_infer_engine.models.transformers_backend.sharding.forwards import summed
from mini_infer_engine.models.transformers_backend.sharding.linear import shard_linear
from mini_infer_engine.models.transformers_backend.sharding.parameters import ParameterCuts, ShardedParameter
from mini_infer_engine.models.transformers_backend.sharding.plan import (
    ALL_REDUCE,
    EXPERTS,
    WHOLE_EXPERTS,
    WITHOUT_EFFECT,
    ShardingPlan,
    plan_of,
)
from mini_infer_engine.models.transformers_backend.sharding.vocabulary import shard_vocabulary

_KEYS_AND_VALUES = ("k_proj", "v_proj")
"""Layers of which several ranks have the same head if there are fewer heads of keys and values than ranks."""


@dataclass(frozen=True, slots=True)
class KVHeads:
    """The heads of keys and values of the whole model."""

    count: int
    dim: int

    def shard_of(self, name: str, module: nn.Module, parallel: TensorParallel) -> Shard | None:
        """Returns the outputs of a rank's heads where several ranks have the same one, None for all other layers."""
        total = self.count * self.dim
        if name.rpartition(".")[2] not in _KEYS_AND_VALUES or getattr(module, "out_features", None) != total:
            return None
        return parallel.heads(self.count, self.dim) if self.count < parallel.size else None


def shard(model: PreTrainedModel, parallel: TensorParallel, heads: KVHeads) -> dict[str, ShardedParameter]:
    """Cuts the parameters of a model on the meta device, and has its modules communicate.

    Returns the parameters of which this rank has a part, by name; those of tied layers have several.

    Raises:
        UnsupportedError: the model has no plan, or one that these ranks cannot follow.
    """
    cuts, plan = ParameterCuts(parallel), plan_of(model, whole_experts=parallel.whole_experts)
    untyped: Any = model  # as transformers leaves these methods
    of_vocabulary = (untyped.get_input_embeddings(), untyped.get_output_embeddings())
    for name, module in list(model.named_modules()):
        if module not in of_vocabulary:
            _shard_module(cuts, plan, heads, name, module)
    if not cuts.made:
        raise UnsupportedError("transformers has no plan by which ranks share its layers (base_model_tp_plan)")
    shard_vocabulary(cuts, model, plan)
    return cuts.made


def _shard_module(cuts: ParameterCuts, plan: ShardingPlan, heads: KVHeads, name: str, module: nn.Module) -> None:
    """Cuts the parameters of one module, without its children, and changes what it communicates."""
    kind, own = plan.kind(name), [own for own, _ in module.named_parameters(recurse=False)]
    kinds = {each: found for each in own if (found := plan.kind(f"{name}.{each}")) is not None}
    if kinds and kind != EXPERTS:
        _shard_vectors(cuts, name, module, kinds)
    if kind == EXPERTS:
        if kinds:  # otherwise the experts stay whole on each rank
            shard_experts(cuts, name, module, kinds)
    elif kind == ALL_REDUCE:
        module.forward = summed(module.forward)
    elif kind is not None and kind not in (*WITHOUT_EFFECT, WHOLE_EXPERTS):
        rows = heads.shard_of(name, module, cuts.parallel) if kind == "colwise" else None
        shard_linear(cuts, name, module, kind, rows)


def _shard_vectors(cuts: ParameterCuts, name: str, module: nn.Module, kinds: Mapping[str, str]) -> None:
    """Cuts parameters that have an element for each head or column of the rank, such as attention sinks [heads].

    Raises:
        UnsupportedError: they have more dimensions, or the plan does not cut them by columns.
    """
    for own, kind in kinds.items():
        parameter = module.get_parameter(own)
        if kind != "colwise" or parameter.ndim != 1:
            raise UnsupportedError(f"its plan cuts {name}.{own}, and no result that the ranks sum")
        share = cuts.share(f"the size of {name}.{own}", parameter.shape[0])
        cuts.cut(name, module, own, Part(0, share))
