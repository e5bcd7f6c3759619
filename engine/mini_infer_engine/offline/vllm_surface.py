"""vLLM's Python API that is not here, by name, with what to use instead. Knows nothing of this engine's own API."""

_WEIGHTS = "weights do not change while the engine runs: make another LLM"
_ONE_PROCESS = "workers are not reachable from outside: options of LLM set what they do"

METHODS: dict[str, str] = {
    "apply_model": _ONE_PROCESS,
    "collective_rpc": _ONE_PROCESS,
    "enqueue": "LLM.generate takes all prompts at once",
    "enqueue_chat": "LLM.chat takes all conversations at once",
    "finish_weight_update": _WEIGHTS,
    "get_world_size": "LLM.settings has tensor_parallel_size and pipeline_parallel_size",
    "init_weight_transfer_engine": _WEIGHTS,
    "llm_engine": "LLMEngine(EngineArgs(...)) is an engine to step",
    "preprocess_chat": "LLM.chat renders conversations; POST /v1/chat/completions/render shows how",
    "preprocess_cmpl": "LLM.generate tokenises prompts; POST /v1/completions/render shows how",
    "render_chat": "POST /v1/chat/completions/render shows how conversations are rendered",
    "reset_encoder_cache": "embeddings of images are dropped when others need room",
    "reset_mm_cache": "embeddings of images are dropped when others need room",
    "reward": "LLM.classify(..., pooling_params=PoolingParams(use_activation=False)) returns the score of each prompt",
    "set_tokenizer": "the tokenizer is that of the model's folder: put tokenizer.json there",
    "sleep": "delete the LLM to free its memory, and make another one",
    "start_profile": "run the program under torch.profiler or nsys",
    "start_weight_update": _WEIGHTS,
    "stop_profile": "run the program under torch.profiler or nsys",
    "update_weights": _WEIGHTS,
    "wait_for_completion": "LLM.generate returns when all prompts are finished",
    "wake_up": "delete the LLM to free its memory, and make another one",
}
"""Methods and attributes of vLLM's `LLM`."""

NAMES: dict[str, str] = {
    "LoRARequest": "adapters are not served yet: merge them into the weights",
    "ModelRegistry": "docs/models.md lists the architectures that there are",
    "PromptType": "a prompt is a text, token ids, TextPrompt or TokensPrompt",
    "initialize_ray_cluster": "--nnodes and --master-addr connect machines: docs/parallelism.md",
}
"""Names that `vllm` exports."""


def missing(owner: str, name: str, remedy: str) -> str:
    """Returns the message of the error for a name that is not here."""
    return f"{owner}.{name} is vLLM's, and not here: {remedy}"


def attribute_error(owner: str, name: str) -> AttributeError:
    """Returns the error for an unknown attribute of an object; it says what to use in place of one of vLLM's."""
    if name in METHODS:
        return AttributeError(missing(owner, name, METHODS[name]))
    return AttributeError(f"{owner!r} object has no attribute {name!r}")


def refuse_adapter(lora_request: object) -> None:
    """Raises ValueError if there is an adapter."""
    if lora_request is not None:
        raise ValueError("lora_request: adapters are not served yet: leave it out, or merge them into the weights")


def refuse_others(
    method: str, arguments: dict[str, object], neutral: dict[str, tuple[object, ...]], owner: str = "LLM"
) -> None:
    """Accepts keywords of vLLM's at values that request nothing.

    Raises TypeError for an unknown keyword. Raises ValueError if one requests something; it says what to do instead.
    """
    for name, value in arguments.items():
        if name not in neutral:
            raise TypeError(f"{owner}.{method}() got an unexpected keyword argument {name!r}")
        if value not in neutral[name]:
            remedy = _REMEDIES.get(name, "leave it out")
            raise ValueError(f"{name} = {str(value)[:200]!r} is not supported by {owner}.{method}: {remedy}")


_REMEDIES = {
    "chat_template": "name its file in LLM(chat_template=...)",
    "chat_template_content_format": "the template's own form is found out: leave it out",
    "concurrency_limit": "all prompts run at once: leave it out",
    "lora_request": "adapters are not served yet: leave it out, or merge them into the weights",
    "mm_processor_kwargs": "the model's preprocessor_config.json says how images are read",
    "priority": "all prompts run at once: leave it out",
    "tokenization_kwargs": "give token ids, cut as they should be",
}
CHAT: dict[str, tuple[object, ...]] = {
    "chat_template": (None,),
    "chat_template_content_format": (None, "auto", "string"),
    "mm_processor_kwargs": (None, {}),
    "tokenization_kwargs": (None, {}),
}
GENERATE: dict[str, tuple[object, ...]] = {"tokenization_kwargs": (None, {}), "mm_processor_kwargs": (None, {})}
ADD_REQUEST: dict[str, tuple[object, ...]] = GENERATE | {
    "arrival_time": (None,),
    "data_parallel_rank": (None,),
    "prompt_text": (None,),
    "reasoning_ended": (None,),
    "trace_headers": (None, {}),
}
FROM_ENGINE_ARGS: dict[str, tuple[object, ...]] = {
    "client_addresses": (None, {}),
    "client_count": (1,),
    "client_index": (0,),
    "disable_log_requests": (True, False),
    "disable_log_stats": (True, False),
    "enable_log_requests": (True, False),
    "enable_multiprocessing": (True, False),
    "start_engine_loop": (True,),
    "stat_loggers": (None, []),
}
POOLING: dict[str, tuple[object, ...]] = {
    "chat_template": (None,),
    "lora_request": (None,),
    "priority": (None,),
    "tokenization_kwargs": (None, {}),
}
BEAM_SEARCH: dict[str, tuple[object, ...]] = {"concurrency_limit": (None,), "lora_request": (None,)}
"""Keywords of vLLM's methods, and the values at which they request nothing."""
