"""Keywords of vLLM's `LLM` that have another name here, or nothing to switch: those at values that ask for nothing."""

from collections.abc import Mapping
from typing import Any

from mini_infer_engine.speculation.config import options_of_config

_ANY_BOOLEAN = (False, True)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "distributed_executor_backend": (None, "mp"),
    "disable_custom_all_reduce": _ANY_BOOLEAN,
    "trust_remote_code": _ANY_BOOLEAN,  # no code of a model's folder is ever run
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "runner": ("auto", "generate"),
    "cpu_offload_gb": (0,),
    "swap_space": (0, 4),  # vLLM's old default; what is preempted here is computed again
    "enable_lora": (False,),
    "enable_chunked_prefill": (None, True),
    "disable_log_stats": _ANY_BOOLEAN,
    "hf_overrides": (None, {}),
    "limit_mm_per_prompt": (None, {}),
}


_RENAMED = {"kv_cache_memory_bytes": "kv_cache_memory"}


def to_own_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is left for EngineSettings. ValueError: one of the neutral keywords asks for something."""
    for name, values in _NEUTRAL.items():
        if name in settings and settings[name] not in values:
            accepted = " or ".join(map(repr, values))
            raise ValueError(f"{name} = {settings[name]!r} is not supported: leave it out, or at {accepted}")
    settings = dict(settings)
    if (speculation := settings.pop("speculative_config", None)) is not None:
        settings |= options_of_config(speculation)
    return {_RENAMED.get(name, name): value for name, value in settings.items() if name not in _NEUTRAL}
