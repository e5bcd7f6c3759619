"""Decides whether the ranks of a tensor-parallel group can share a model, and shards it for one of them.

The decision is taken by a probe of a rank's part, which has no memory: a plan that its own code cannot follow, as with
numbers of heads that are written in it, is refused before weights are read.
"""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from mini_infer_engine.communication.collectives import NoCollectives
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.models.transformers_backend.build import build, fix_rotations
from mini_infer_engine.models.transformers_backend.config import TransformersConfig
from mini_infer_engine.models.transformers_backend.errors import UnsupportedError
from mini_infer_engine.models.transformers_backend.probe import PROBE, LayerCall, probe
from mini_infer_engine.models.transformers_backend.sharding.forwards import communicating
from mini_infer_engine.models.transformers_backend.sharding.parameters import ShardedParameter
from mini_infer_engine.models.transformers_backend.sharding.shard import KVHeads, shard


def shard_for_rank(model: PreTrainedModel, config: TransformersConfig) -> dict[str, ShardedParameter]:
    """Cuts a model without memory for the rank of a config. Returns the parameters of which it has a part, by name.

    Raises:
        UnsupportedError: the model has no plan, or one that these ranks cannot follow.
    """
    parallel = config.tensor_parallel
    return {} if parallel.size == 1 else shard(model, parallel, KVHeads(config.num_kv_heads, config.head_dim))


def check_ranks(config: TransformersConfig) -> None:
    """Probes a rank's part of the model.

    Raises:
        ModelError: the ranks cannot share the model; the message gives the reason.
    """
    parallel = config.tensor_parallel
    if parallel.size == 1:
        return
    obstacles = [
        parallel.obstacle("num_attention_heads", config.num_heads),
        parallel.obstacle("num_key_value_heads", config.num_kv_heads, copies=True),
    ]
    for obstacle in filter(None, obstacles):
        raise ModelError(f"{config.architecture}: {obstacle}.")
    try:
        model = build(config.hf_config, PROBE, torch.float32, trust_remote_code=config.trust_remote_code)
        fix_rotations(model, 1)
        shard_for_rank(model, config)
        with communicating(NoCollectives(parallel)):
            calls = probe(model).calls
        _check_calls(calls, config)
    except UnsupportedError as error:
        raise ModelError(
            f"tensor_parallel_size = {parallel.size}: {config.architecture} does not run through transformers on "
            f"several ranks: {error}. Leave tensor_parallel_size out for this model."
        ) from error


def _check_calls(calls: tuple[LayerCall, ...], config: TransformersConfig) -> None:
    """Raises UnsupportedError if a rank's attention is not that of the model with the rank's heads.

    Heads may also be all of them, where a plan gathers them before attention.
    """
    parallel = config.tensor_parallel
    if len(calls) != len(config.calls):
        raise UnsupportedError(f"a rank attends {len(calls)} times, the whole model {len(config.calls)} times")
    for call, whole in zip(calls, config.calls, strict=True):
        for name in ("num_heads", "num_kv_heads"):
            all_heads = getattr(whole, name)
            own, found = parallel.num_heads(all_heads), getattr(call, name)
            if found not in (own, all_heads):
                raise UnsupportedError(f"a rank attends with {name} = {found}, and its share is {own}")
        if replace(call, num_heads=whole.num_heads, num_kv_heads=whole.num_kv_heads) != whole:
            raise UnsupportedError(f"a rank's attention ({call}) is not the whole model's ({whole})")
