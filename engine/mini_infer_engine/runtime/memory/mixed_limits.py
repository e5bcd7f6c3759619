"""Decides what a model whose layers have different KV heads does not support yet. A start with it is refused, with the
remedy.
"""

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import EngineSettings


def check_mixed_heads(settings: EngineSettings, config: ModelConfig, device_type: str, *, moves_kv: bool) -> None:
    """Raises ModelError if the model's layers have different KV heads, and the engine is to do what they cannot do yet.

    `moves_kv` says if keys and values go to other engines or come from them.
    """
    if config.head_shapes is None:
        return
    obstacle = _obstacle(settings, config, device_type, moves_kv=moves_kv)
    if obstacle is not None:
        raise ModelError(f"{config.architecture} has layers with different KV heads: {obstacle}.")


def _obstacle(settings: EngineSettings, config: ModelConfig, device_type: str, *, moves_kv: bool) -> str | None:
    """Returns the option that these layers do not support, with the reason and the remedy, or None."""
    if settings.pipeline_parallel_size > 1:
        return "pipeline_parallel_size: layers share keys and values with others, which would be in other stages"
    if moves_kv:
        return "transfer_port: pages with layers of different widths are not sent to other engines yet: leave it out"
    if settings.kv_cache_dtype != "auto":
        return "kv_cache_dtype: their pages are stored in the model's dtype only yet: leave it out"
    if settings.quantization is not None:
        return f"quantization = {settings.quantization!r}: their weights are not rounded yet: leave it out"
    if device_type == "cpu" or settings.attention_backend == "torch":
        return None
    if settings.attention_backend == "flash":
        return "attention_backend = 'flash' reads pages of one width: use 'triton', 'torch' or 'auto'"
    if config.needs_token_ids and not settings.enforce_eager:
        return "enforce_eager: CUDA graphs do not look up inputs of layers by token yet: add --enforce-eager"
    return None
