"""vLLM's names for options that have another name here, or nothing to switch. For `LLM` and the command line.

Knows which of their values request nothing here; the options of this engine check themselves.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.options import option_rows
from mini_infer_engine.config.options.speculation import options_of_config

_ANY: tuple[Any, ...] = ()
"""Marks a name that may have any value: answers are the same, and there is nothing here that it would tune."""
_OFF = (None, False)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "additional_config": (None, {}),
    "aggregate_engine_logging": _ANY,
    "all2all_backend": _ANY,
    "allow_deprecated_quantization": _ANY,
    "api_server_count": (None, 1),
    "async_scheduling": _ANY,  # --step-depth
    "attention_config": (None, {}),
    "calculate_kv_scales": _OFF,
    "chat_template_content_format": (None, "auto"),
    "code_revision": (None,),
    "collect_detailed_traces": (None,),
    "compilation_config": _ANY,
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none", "embed", "classify"),
    "cpu_offload_gb": (None, 0),
    "cuda_graph_sizes": _ANY,
    "cudagraph_capture_sizes": _ANY,
    "cudagraph_metrics": _ANY,
    "data_parallel_backend": ("mp",),
    "data_parallel_external_lb": _OFF,
    "data_parallel_hybrid_lb": _OFF,
    "decode_context_parallel_size": (None, 1),
    "default_chat_template_kwargs": (None, {}),
    "disable_async_output_proc": _ANY,
    "disable_cascade_attn": _ANY,
    "disable_custom_all_reduce": _ANY,
    "disable_fastapi_docs": _OFF,
    "disable_frontend_multiprocessing": _ANY,
    "disable_log_requests": _ANY,  # prompts are never logged
    "disable_log_stats": _ANY,
    "disable_mm_preprocessor_cache": _ANY,
    "disable_sliding_window": _OFF,
    "distributed_executor_backend": (None, "mp", "uni"),
    "distributed_timeout_seconds": _ANY,
    "enable_chunked_prefill": (None, True),
    "enable_dbo": _OFF,
    "enable_elastic_ep": _OFF,
    "enable_ep_weight_filter": _ANY,
    "enable_eplb": _OFF,
    "enable_flash_late_interaction": _ANY,
    "enable_layerwise_nvtx_tracing": _OFF,
    "enable_log_deltas": _ANY,
    "enable_log_outputs": _OFF,
    "enable_log_requests": _OFF,
    "enable_lora": _OFF,
    "enable_lora_bias": _OFF,
    "enable_mfu_metrics": _ANY,
    "enable_mm_embeds": _OFF,
    "enable_offline_docs": _ANY,
    "enable_prompt_adapter": _OFF,
    "enable_prompt_embeds": _OFF,
    "enable_prompt_tokens_details": _ANY,  # usage always has them
    "enable_request_id_headers": _ANY,  # answers always have x-request-id
    "enable_return_routed_experts": _OFF,
    "enable_server_load_tracking": _ANY,  # /load always answers
    "enable_sleep_mode": _OFF,
    "enable_ssl_refresh": _ANY,  # files of TLS are always read again when they change
    "enable_tokenizer_info_endpoint": _ANY,  # /tokenizer_info always answers
    "exclude_tools_when_tool_choice_none": _ANY,  # they always are
    "fail_on_environ_validation": _ANY,
    "fingerprint_mode": ("full",),
    "fully_sharded_loras": _ANY,
    "grpc": _OFF,
    "guided_decoding_backend": _ANY,
    "h11_max_header_count": _ANY,
    "h11_max_incomplete_event_size": _ANY,
    "headless": _OFF,
    "hf_config_path": (None,),
    "hf_token": (None,),
    "ignore_patterns": _ANY,
    "interleave_mm_strings": _ANY,
    "io_processor_plugin": (None,),
    "kv_cache_metrics": _ANY,
    "kv_cache_metrics_sample": _ANY,
    "kv_offloading_size": (None, 0),
    "kv_sharing_fast_prefill": _OFF,
    "language_model_only": _ANY,  # all models are
    "linear_backend": _ANY,
    "log_error_stack": _ANY,
    "logits_processors": (None, []),
    "logprobs_mode": ("raw_logprobs",),
    "lora_dtype": _ANY,
    "mamba_block_size": _ANY,
    "mamba_cache_dtype": _ANY,
    "mamba_ssm_cache_dtype": _ANY,
    "max_cpu_loras": _ANY,
    "max_cudagraph_capture_size": _ANY,
    "max_log_len": _ANY,  # prompts are never logged
    "max_logprobs": (None, 20),
    "max_long_partial_prefills": _ANY,
    "max_loras": _ANY,
    "max_num_partial_prefills": _ANY,
    "max_parallel_loading_workers": _ANY,
    "max_seq_len_to_capture": _ANY,
    "media_io_kwargs": (None, {}),
    "mm_encoder_attn_backend": _ANY,
    "mm_encoder_tp_mode": _ANY,
    "mm_processor_cache_gb": _ANY,
    "mm_processor_cache_type": _ANY,
    "mm_processor_kwargs": (None, {}),
    "mm_shm_cache_max_object_size_mb": _ANY,
    "model_loader_extra_config": (None, {}),
    "moe_backend": _ANY,
    "multi_step_stream_outputs": _ANY,
    "num_gpu_blocks_override": (None,),
    "num_lookahead_slots": _ANY,
    "num_scheduler_steps": _ANY,
    "numa_bind": _ANY,
    "optimization_level": _ANY,
    "otlp_traces_endpoint": (None,),
    "override_attention_dtype": (None, "auto"),
    "override_generation_config": (None, {}),
    "performance_mode": _ANY,
    "pooler_config": (None, {}),
    "preemption_mode": _ANY,
    "prefill_context_parallel_size": (None, 1),
    "prefix_caching_hash_algo": _ANY,
    "pt_load_map_location": _ANY,
    "ray_workers_use_nsight": _OFF,
    "renderer_num_workers": _ANY,
    "response_role": ("assistant",),
    "root_path": (None, ""),
    "runner": ("auto", "generate", "pooling"),  # a model's files decide what it answers
    "safetensors_load_strategy": _ANY,
    "scheduler_cls": (None,),
    "scheduler_delay_factor": (0,),
    "scheduler_reserve_full_isl": _ANY,
    "show_hidden_metrics_for_version": _ANY,
    "shutdown_timeout": _ANY,  # --drain-timeout
    "skip_mm_profiling": _ANY,
    "ssl_ciphers": (None,),
    "stream_interval": (None, 1),
    "structured_outputs_config": (None, {}),
    "swap_space": _ANY,  # what is preempted here is computed again, or kept by --kv-swap-memory
    "task": ("auto", "generate", "embed", "embedding", "classify", "score", "reward"),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto", "hf"),
    "tokenizer_pool_extra_config": _ANY,
    "tokenizer_pool_size": _ANY,
    "tokenizer_pool_type": _ANY,
    "tokenizer_revision": (None,),
    "tool_server": (None,),
    "trust_request_chat_template": _OFF,
    "use_tqdm_on_load": _ANY,
    "use_v2_block_manager": _ANY,
    "uvicorn_log_level": _ANY,
    "video_pruning_rate": _ANY,
    "worker_cls": (None, "auto"),
    "worker_extension_cls": (None, ""),
    "worker_use_ray": _OFF,
}
SWITCHES = frozenset(
    (
        *(name for name, values in _NEUTRAL.items() if values is _OFF),
        *("aggregate_engine_logging", "allow_deprecated_quantization", "async_scheduling", "cudagraph_metrics"),
        *("disable_async_output_proc", "disable_cascade_attn", "disable_custom_all_reduce"),
        *("disable_frontend_multiprocessing", "disable_log_requests", "disable_log_stats"),
        *("disable_mm_preprocessor_cache", "disable_uvicorn_access_log"),
        *("enable_chunked_prefill", "enable_ep_weight_filter", "enable_flash_late_interaction", "enable_log_deltas"),
        *("enable_mfu_metrics", "enable_offline_docs", "enable_prompt_tokens_details", "enable_request_id_headers"),
        *("enable_server_load_tracking", "enable_ssl_refresh", "enable_tokenizer_info_endpoint"),
        *("exclude_tools_when_tool_choice_none", "fail_on_environ_validation", "fully_sharded_loras"),
        *("interleave_mm_strings", "kv_cache_metrics", "language_model_only", "log_error_stack"),
        *("multi_step_stream_outputs", "numa_bind", "scheduler_reserve_full_isl", "skip_mm_profiling"),
        *("use_tqdm_on_load", "use_v2_block_manager"),
    )
)
"""Flags of vLLM's that take no value."""
SEVERAL = frozenset(("cuda_graph_sizes", "cudagraph_capture_sizes", "logits_processors", "lora_modules"))
"""Flags of vLLM's that take all words up to the next flag."""
_REMEDIES = {
    "api_server_count": "one process answers HTTP; --data-parallel-size starts several engines behind it",
    "cpu_offload_gb": "weights stay on the device; --quantization int8 halves them, --tensor-parallel-size shares them",
    "enable_chunked_prefill": "prompts are always computed in chunks; --max-num-batched-tokens is their size",
    "default_chat_template_kwargs": "requests have chat_template_kwargs; a --chat-template may have other defaults",
    "enable_lora": "adapters are not served yet: merge them into the weights",
    "language_model_only": "--limit-mm-per-prompt '{\"image\": 0}' serves text alone",
    "max_logprobs": "requests may ask for the 20 most likely tokens, or for all with -1",
    "num_gpu_blocks_override": "--kv-cache-memory sets the size of the KV cache in bytes",
    "override_generation_config": "--generation-config names a folder whose file has them",
    "pooler_config": "1_Pooling/config.json in the model's folder says how it pools",
    "runner": "a draft model is --speculative-model",
    "stream_interval": "an event goes out with each step",
    "structured_outputs_config": "llguidance enforces all output; --reasoning-parser is an option of its own",
    "task": "audio is not served",
    "tokenizer": "the tokenizer is that of the model's folder: put tokenizer.json there",
}
_ELSEWHERE = {
    "data_parallel_address": "--master-addr, on each machine",
    "data_parallel_size_local": "--nnodes shares the devices out",
    "disable_uvicorn_access_log": "it is --no-access-log",
    "disable_access_log_for_endpoints": "it is --no-access-log, for all",
    "log_config_file": "--log-level and --log-format",
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
    """Returns the option that an alias of a flag means, as keywords spell it."""
    return _RENAMED.get(name, name)


def check_neutral(name: str, value: Any, model: str | None = None, shown: str = "") -> None:
    """Checks a name of vLLM's that is no option here. `shown` is the name as its user wrote it. Raises KeyError if it
    is unknown.

    Raises ValueError if its value requests something; it says what to do instead.
    """
    shown = shown or name
    if name in _ELSEWHERE:
        raise ValueError(f"{shown} is vLLM's, and not here: {_ELSEWHERE[name]}")
    values = _NEUTRAL[name]
    if values is _ANY or value in values or (name == "tokenizer" and value == model):
        return
    if name == "structured_outputs_config" and _only_chooses_a_backend(value):
        return
    accepted = " or ".join(map(repr, values))
    remedy = f" ({_REMEDIES[name]})" if name in _REMEDIES else ""
    raise ValueError(f"{shown} = {value!r} is not supported: leave it out, or at {accepted}{remedy}")


def _only_chooses_a_backend(value: Any) -> bool:
    """True if a `structured_outputs_config` has nothing but vLLM's choice among libraries."""
    own = ("backend", "disable_fallback", "disable_any_whitespace", "disable_additional_properties")
    return isinstance(value, Mapping) and all(name in own and (name == "backend" or not value[name]) for name in value)


def is_other_option(name: str) -> bool:
    """True if vLLM has an option of this name that is none here."""
    return name in _NEUTRAL or name in _ELSEWHERE


def to_own_names(settings: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
    """Returns the keywords that are left for EngineSettings. Raises ValueError if one of vLLM's others requests
    something.
    """
    own = set(EngineOptions.__struct_fields__)
    left = {}
    for name, value in settings.items():
        option = renamed(name)
        if option in own or (name not in _NEUTRAL and name not in _ELSEWHERE):
            left[option] = value
        else:
            check_neutral(name, value, model)
    for name in ("hf_overrides", "limit_mm_per_prompt"):
        if isinstance(given := left.get(name), Mapping):
            left[name] = msgspec.json.encode(given).decode()
    if (speculation := left.pop("speculative_config", None)) is not None:
        left |= options_of_config(speculation)
    return left


_RENAMED = {
    alias.lstrip("-").replace("-", "_"): row.name for row in option_rows(EngineOptions) for alias in row.option.aliases
}
