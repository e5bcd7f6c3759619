"""vLLM's names for options that have another one here, or nothing to switch. For `LLM` and the command line.

Knows which values of them ask for nothing here; the options that there are know themselves.
"""

from collections.abc import Mapping
from typing import Any

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.options import option_rows
from mini_infer_engine.config.speculation import options_of_config

_ANY: tuple[Any, ...] = ()
"""Whatever it is set to: answers are the same, and there is nothing here that it would tune."""
_OFF = (None, False)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allow_deprecated_quantization": _ANY,
    "api_server_count": (None, 1),
    "async_scheduling": _ANY,  # --step-depth
    "chat_template_content_format": (None, "auto"),
    "code_revision": (None,),
    "compilation_config": _ANY,
    "config_format": ("auto", "hf"),
    "cpu_offload_gb": (None, 0),
    "cuda_graph_sizes": _ANY,
    "cudagraph_capture_sizes": _ANY,
    "data_parallel_backend": ("mp",),
    "disable_async_output_proc": _ANY,
    "disable_cascade_attn": _ANY,
    "disable_custom_all_reduce": _ANY,
    "disable_frontend_multiprocessing": _ANY,
    "disable_hybrid_kv_cache_manager": _ANY,
    "disable_log_requests": _ANY,  # prompts are never logged
    "disable_log_stats": _ANY,
    "disable_sliding_window": _OFF,
    "distributed_executor_backend": (None, "mp", "uni"),
    "enable_chunked_prefill": (None, True),
    "enable_eplb": _OFF,
    "enable_log_requests": _OFF,
    "enable_lora": _OFF,
    "enable_prompt_embeds": _OFF,
    "enable_prompt_tokens_details": _ANY,  # usage always has them
    "enable_server_load_tracking": _ANY,  # /load always answers
    "enable_sleep_mode": _OFF,
    "guided_decoding_backend": _ANY,
    "hf_config_path": (None,),
    "hf_overrides": (None, {}),
    "hf_token": (None,),
    "limit_mm_per_prompt": (None, {}),
    "logits_processors": (None, []),
    "logprobs_mode": ("raw_logprobs",),
    "max_cudagraph_capture_size": _ANY,
    "max_logprobs": (None, 20),
    "max_long_partial_prefills": _ANY,
    "max_num_partial_prefills": _ANY,
    "max_parallel_loading_workers": _ANY,
    "max_seq_len_to_capture": _ANY,
    "mm_processor_kwargs": (None, {}),
    "model_impl": ("auto", "vllm"),
    "num_gpu_blocks_override": (None,),
    "num_lookahead_slots": _ANY,
    "num_scheduler_steps": _ANY,
    "optimization_level": _ANY,
    "override_generation_config": (None, {}),
    "performance_mode": _ANY,
    "preemption_mode": _ANY,
    "prefix_caching_hash_algo": _ANY,
    "response_role": ("assistant",),
    "root_path": (None, ""),
    "runner": ("auto", "generate"),
    "safetensors_load_strategy": _ANY,
    "scheduler_delay_factor": (0,),
    "scheduling_policy": ("fcfs", "priority"),  # equal priorities are served in order of arrival
    "structured_outputs_config": (None, {}),
    "swap_space": _ANY,  # what is preempted here is computed again, or kept by --kv-swap-memory
    "task": ("auto", "generate"),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto", "hf"),
    "tokenizer_pool_size": _ANY,
    "tokenizer_revision": (None,),
    "trust_remote_code": _ANY,  # no code of a model's folder is ever run
    "use_v2_block_manager": _ANY,
    "uvicorn_log_level": _ANY,
}
_REMEDIES = {
    "api_server_count": "one process answers HTTP; --data-parallel-size starts several engines behind it",
    "cpu_offload_gb": "weights stay on the device; --quantization int8 halves them, --tensor-parallel-size shares them",
    "enable_chunked_prefill": "prompts are always computed in chunks; --max-num-batched-tokens is their size",
    "enable_lora": "adapters are not served yet: merge them into the weights",
    "max_logprobs": "requests may ask for the 20 most likely tokens, or for all with -1",
    "num_gpu_blocks_override": "--kv-cache-memory sets the size of the KV cache in bytes",
    "override_generation_config": "--generation-config names a folder whose file has them",
    "structured_outputs_config": "--reasoning-parser is an option of its own",
    "tokenizer": "the tokenizer is that of the model's folder: put tokenizer.json there",
}
_ELSEWHERE = {
    "allowed_local_media_path": "images are not served",
    "disable_uvicorn_access_log": "it is --no-access-log",
    "config": "write the file's entries as flags",
    "download_dir": "set HF_HUB_CACHE, where huggingface_hub keeps models",
    "kv_events_config": "--events-port and --replay-port publish KV events",
    "kv_transfer_config": "--role and --transfer-port: docs/disaggregated.md",
    "lora_modules": "adapters are not served yet: merge them into the weights",
    "max_lora_rank": "adapters are not served yet: merge them into the weights",
    "middleware": "put a proxy in front",
    "tool_parser_plugin": "--tool-call-parser names those that there are",
    "uds": "--host and --port",
}
"""Names that have no neutral value, or none that this file knows of."""


def renamed(name: str) -> str:
    """The option that an alias of a flag means, as keywords spell it."""
    return _RENAMED.get(name, name)


def check_neutral(name: str, value: Any, model: str | None = None, shown: str = "") -> None:
    """Of a name of vLLM's that there is not here. KeyError: it is unknown. `shown` is how its user wrote it.

    ValueError: it asks for something, and what to do instead.
    """
    shown = shown or name
    if name in _ELSEWHERE:
        raise ValueError(f"{shown} is vLLM's, and not here: {_ELSEWHERE[name]}")
    values = _NEUTRAL[name]
    if values is _ANY or value in values or (name == "tokenizer" and value == model):
        return
    accepted = " or ".join(map(repr, values))
    remedy = f" ({_REMEDIES[name]})" if name in _REMEDIES else ""
    raise ValueError(f"{shown} = {value!r} is not supported: leave it out, or at {accepted}{remedy}")


def to_own_names(settings: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
    """What is left for EngineSettings. ValueError: one of the neutral keywords asks for something."""
    own = set(EngineOptions.__struct_fields__)
    left = {}
    for name, value in settings.items():
        option = renamed(name)
        if option in own or (name not in _NEUTRAL and name not in _ELSEWHERE):
            left[option] = value
        else:
            check_neutral(name, value, model)
    if (speculation := left.pop("speculative_config", None)) is not None:
        left |= options_of_config(speculation)
    return left


_RENAMED = {
    alias.lstrip("-").replace("-", "_"): row.name for row in option_rows(EngineOptions) for alias in row.option.aliases
}
