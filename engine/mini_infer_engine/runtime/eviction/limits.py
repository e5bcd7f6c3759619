"""Decides which models and engines evict no tokens yet. A start with such a policy is refused, and so are requests."""

from collections.abc import Sequence

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.mixed_pool import MixedKVPool


def eviction_obstacle(
    config: ModelConfig, layers: Sequence[AttentionBlock], pool: KVPool, max_model_len: int
) -> str | None:
    """Returns what rules out that sequences lose cached tokens, as the end of a sentence; None if nothing does."""
    if config.recurrence is not None:
        return "the model has layers with a recurrent state, which retains no tokens"
    if not all(isinstance(layer, Attention) for layer in layers):
        return "the model caches latents"
    if isinstance(pool, MixedKVPool) or len({layer.layer for layer in layers}) < len(layers):
        return "the model's layers have different heads, or share keys and values"
    if pool.bounds is not None and pool.pages.device.type != "cpu":
        return "on a GPU, tokens that are kept have no bounds yet by which decodes select pages (--kv-selection)"
    if any(layer.sliding_window is not None and layer.sliding_window < max_model_len for layer in layers):
        return "a sliding window of the model counts cached tokens"
    if config.stage.size > 1:
        return "the stages of a pipeline evict no tokens yet (--pipeline-parallel-size)"
    return None


def check_eviction(settings: EngineSettings, obstacle: str | None, *, moves_kv: bool) -> None:
    """Raises ModelError if the engine's own policy cannot work with its model or its other options."""
    if settings.kv_policy == "full":
        return
    if moves_kv:
        obstacle = "KV transfer moves whole caches (--transfer-port)"
    if obstacle is not None:
        raise ModelError(f"--kv-policy {settings.kv_policy}: {obstacle}. Leave it out, or set --kv-policy full.")
