"""Chooses the format in which keys and values are stored, by settings, checkpoint and machine."""

import logging

import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.models.kv_spec import FP8, KV_QUANTIZATIONS, KVQuantization, KVSpec
from mini_infer_engine.models.registry import class_of
from mini_infer_engine.runtime.memory.int4_rows import ROW_SIZES, row_size

log = logging.getLogger(__name__)

_FP8_COMPUTE_CAPABILITY = (8, 9)
"""Compute capability from which a GPU converts e4m3 and Triton supports it."""
_MOST_QUERY_HEADS = 32
"""Most query heads of a KV head. With 71, decode attention was wrong now and then on an H200, where tiles of 64 rows
and more use the tensor cores' wider instruction.
"""


def kv_quantization_of(settings: EngineSettings, config: ModelConfig, device: torch.device) -> KVQuantization | None:
    """Returns the quantization of keys and values, or None if they have the model's dtype.

    Raises ModelError if the settings request a quantization that is not supported. The checkpoint's own request is
    ignored in that case.
    """
    is_explicit = settings.kv_cache_dtype != "auto"
    name = settings.kv_cache_dtype if is_explicit else config.kv_cache_dtype
    if name is None:
        return None
    kind = KV_QUANTIZATIONS[name]
    obstacle = _obstacle(kind, settings, config, device)
    if obstacle is not None and is_explicit:
        raise ModelError(f"kv_cache_dtype = {name!r}: {obstacle}.")
    if obstacle is not None:
        log.warning(
            "the checkpoint specifies keys and values in %s; they stay in the model's dtype: %s", name, obstacle
        )
        return None
    return kind


def check_tier_dtype(settings: EngineSettings, config: ModelConfig, spec: KVSpec) -> None:
    """Raises ModelError if the format of blocks in lower tiers does not suit what the model stores of a token."""
    if settings.kv_tier_dtype == "auto":
        return
    if class_of(config).caches_latents:
        obstacle = "this model caches latents, which are small already"
    elif config.attention_alibi:
        obstacle = "its keys have positions (ALiBi), which lose their value in 4 bits"
    elif spec.quantization is not None:
        obstacle = f"it packs pages in the model's dtype, and these are in {spec.quantization.name} (--kv-cache-dtype)"
    elif row_size(*spec.head_dims) is None:
        sizes = " and ".join(map(str, sorted(set(spec.head_dims))))
        obstacle = f"heads of {sizes} elements are no multiples of {ROW_SIZES[-1]}"
    else:
        return
    raise ModelError(f"--kv-tier-dtype {settings.kv_tier_dtype}: {obstacle}: leave it out.")


def _obstacle(kind: KVQuantization, settings: EngineSettings, config: ModelConfig, device: torch.device) -> str | None:
    """Returns the reason why keys and values cannot be stored that way, with the remedy, or None."""
    if class_of(config).caches_latents:
        return "this model caches latents, which are small already: leave it out"
    if settings.kv_selection != "none":
        return "kv_selection bounds keys in the model's dtype only yet: leave one of them out"
    if config.attention_alibi:
        return "its keys have positions (ALiBi), which lose their value in 8 bits: leave it out"
    if settings.attention_backend == "flash":
        return "attention_backend = 'flash' reads 16-bit pages only: use 'triton' or 'auto'"
    if device.type != "cuda" or settings.attention_backend == "torch":
        return None
    if (group := config.num_heads // config.num_kv_heads) > _MOST_QUERY_HEADS:
        return f"its {group} query heads a KV head are more than {_MOST_QUERY_HEADS}: leave it out"
    if kind is FP8 and torch.cuda.get_device_capability(device) < _FP8_COMPUTE_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has no e4m3, which needs compute capability 8.9 or later: use 'int8'"
    return None
