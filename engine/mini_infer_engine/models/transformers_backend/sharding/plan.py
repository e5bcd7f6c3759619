"""Reads the tensor-parallel plan of a model of transformers: which module or parameter is sharded, and how.

The kinds are those of `transformers.distributed.tensor_parallel`. "colwise" is column-parallel and "rowwise"
row-parallel in the terms of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from mini_infer_engine.models.transformers_backend.errors import UnsupportedError

ALL_REDUCE = "all_reduce"
EXPERTS = "moe_tp_experts"
"""The kind of a module whose stacked experts are sharded."""
WHOLE_EXPERTS = "grouped_gemm"
"""The kind of a stack of experts of which each rank has some whole."""
COLUMNS = ("colwise", "packed_colwise", "colwise_gather_output", "colwise_rep")
GATHERS = ("colwise_gather_output", "colwise_rep")
"""Column-parallel layers whose outputs all ranks need."""
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
SPLITS = ("rowwise_split_input", "rowwise_rep")
"""Row-parallel layers whose inputs all ranks have."""
WITHOUT_EFFECT = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "ep_router")
"""Kinds that change gradients alone, or whose work is that of `forwards.own_experts`."""
STACKED: Mapping[str, tuple[int, int]] = {
    "colwise": (-2, 1),
    "rowwise": (-1, 1),
    "packed_colwise": (-2, 2),
    "packed_rowwise": (-1, 2),
    WHOLE_EXPERTS: (0, 1),
}
"""The dimension in which stacked weights of experts are cut, and how many weights lie side by side in it."""
_KNOWN = {"embedding_rowwise", ALL_REDUCE, EXPERTS, *COLUMNS, *ROWS, *WITHOUT_EFFECT, *STACKED}


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The kind of each module and parameter that the plan names."""

    kinds: Mapping[str, str]
    """Kinds by name, with a star for each number of a layer."""

    def kind(self, name: str) -> str | None:
        """Returns the kind of a module or parameter, None if every rank has all of it."""
        return self.kinds.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def plan_of(model: PreTrainedModel, *, whole_experts: bool) -> ShardingPlan:
    """Returns the model's plan.

    Experts are those of its expert-parallel plan if that is requested, or if the other plan leaves them whole.

    Raises:
        UnsupportedError: whole experts are requested, and the model has no plan for them, or a kind is unknown.
    """
    plan, experts = dict(model._tp_plan or {}), dict(model._ep_plan or {})
    if whole_experts and EXPERTS not in experts.values():
        raise UnsupportedError("it has no plan for expert parallelism: leave enable_expert_parallel out")
    if whole_experts or EXPERTS not in plan.values():
        plan |= experts
    if unknown := sorted(name for name, kind in plan.items() if kind not in _KNOWN):
        raise UnsupportedError(f"its plan cuts {unknown[0]} in a way that this engine lacks ({plan[unknown[0]]})")
    return ShardingPlan(plan)
