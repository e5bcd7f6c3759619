"""Chooses the KV groups of an engine: those of its model, or the uniform layout where a feature knows no other."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from mini_infer_engine.config.model.kv_groups import KVCacheConfig, KVGroup, kv_cache_config, uniform_kv_cache
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import ResolvedSettings
from mini_infer_engine.config.options.speculation import speculation_of
from mini_infer_engine.models.registry import class_of

log = logging.getLogger(__name__)


def choose_kv_groups(
    settings: ResolvedSettings, config: ModelConfig, *, moves_kv: bool, units: Sequence[int] = ()
) -> KVCacheConfig:
    """Returns the KV groups, and logs why pages behind a window are retained where they are.

    `moves_kv` says if keys and values go to other engines or come from them. `units` are those of each layer, if layers
    differ in width.
    """
    latents = class_of(config).caches_latents
    longest = min(settings.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    windows = [config.sliding_windows[layer] for layer in config.attention_layers]
    groups = kv_cache_config(windows, longest, caches_latents=latents, units=units)
    if config.recurrence is not None:
        groups = replace(uniform_kv_cache(len(windows)), state_group=_state_group(config))
        log.info("KV groups: %s", groups)
        return groups
    if groups.is_uniform:
        return groups
    obstacle = _obstacle(settings, config.stage.size, moves_kv=moves_kv)
    if obstacle is None:
        log.info("KV groups: %s", groups)
        return groups
    log.info("KV cache retains the tokens behind sliding windows, too: %s", obstacle)
    return uniform_kv_cache(len(windows), units=units)


def _state_group(config: ModelConfig) -> KVGroup:
    return KVGroup("recurrent_state", tuple(config.recurrent_layers))


def _obstacle(settings: ResolvedSettings, num_stages: int, *, moves_kv: bool) -> str | None:
    """Returns the reason why all layers share one page table, or None."""
    if settings.disable_hybrid_kv_cache_manager:
        return "disable_hybrid_kv_cache_manager is set"
    if moves_kv:
        return "KV transfer moves pages of all layers"
    if num_stages > 1:
        return "the stages of a pipeline share one page table for all layers yet (pipeline_parallel_size)"
    speculation = speculation_of(settings)
    if speculation is not None and speculation.reads_text:
        return "a draft model reads the page table of all layers (speculative_method)"
    if settings.kv_swap_memory:
        return "kv_swap_memory takes pages of all layers"
    return None
