"""Divides the tokens of the embeddings and of the head among the ranks, as models of ours do."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mini_infer_engine.models.transformers_backend.errors import UnsupportedError
from mini_infer_engine.models.transformers_backend.sharding.forwards import gathered
from mini_infer_engine.models.transformers_backend.sharding.linear import is_linear
from mini_infer_engine.models.transformers_backend.sharding.parameters import ParameterCuts
from mini_infer_engine.models.transformers_backend.sharding.plan import GATHERS, ShardingPlan


def shard_vocabulary(cuts: ParameterCuts, model: PreTrainedModel, plan: ShardingPlan) -> None:
    """Cuts embeddings and head. A head that the plan does not name stays whole, with embeddings that are tied to it.

    Raises:
        UnsupportedError: the embeddings are more than a table.
    """
    untyped: Any = model  # as transformers leaves these methods
    table, head = untyped.get_input_embeddings(), untyped.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    if not isinstance(table, nn.Embedding) or not _is_table(table):
        raise UnsupportedError(f"its embeddings are a {type(table).__name__}, not a plain table")
    gathers = is_linear(head) and plan.kind(names[head]) in GATHERS
    is_tied = head is not None and head.weight is table.weight
    if gathers or not is_tied:
        cuts.cut_vocabulary(names[table], table, "weight")
        table.padding_idx = None  # it may be another rank's
    if not gathers:
        return
    if is_tied:
        cuts.made[f"{names[head]}.weight"] = cuts.made[f"{names[table]}.weight"]
        head.weight = table.weight
    else:
        cuts.cut_vocabulary(names[head], head, "weight")
    if head.bias is not None:
        cuts.cut_vocabulary(names[head], head, "bias")
    head.forward = gathered(head.forward, head.out_features)


def _is_table(table: nn.Embedding) -> bool:
    """Returns True if looking up a row, and scaling it by `embed_scale`, is all that the module does."""
    return type(table).forward is nn.Embedding.forward or hasattr(table, "embed_scale")
