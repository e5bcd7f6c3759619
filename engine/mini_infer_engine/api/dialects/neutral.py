"""Fields of OpenAI's and vLLM's requests that this server does not support, and the values that do not use them.

A field in these tables is accepted at one of its values, and left out or null; any other value is refused by name.
vLLM's are those of vllm/entrypoints/openai/{chat_completion,completion}/protocol.py.
"""

from typing import Any

Neutral = dict[str, tuple[Any, ...]]
"""Values by field name that request nothing that is not done anyway."""

BOTH: Neutral = {
    # vLLM's.
    "ec_transfer_params": ({},),
    "return_mm_kwargs": (True,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}

CHAT: Neutral = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's.
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_assistant_tokens_mask": (False,),
    "return_prompt_text": (False,),
}

COMPLETION: Neutral = {
    "prompt_embeds": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
}

RESPONSES: Neutral = {
    "access_programs": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "truncation": ("disabled",),
    # Fields of generation that a response has not, or under another name.
    "max_tokens": (),
    "early_stopping": (False,),
    "logprob_token_ids": (),
    "return_prompt_token_ids": (),
    "length_penalty": (1, 1.0),
    "n": (1,),
    "prompt_logprobs": (),
    # vLLM's.
    "ec_transfer_params": ({},),
    "kv_transfer_params": ({},),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "previous_input_messages": (),
    "request_id": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

HINTS = frozenset(
    (
        "media_io_kwargs",
        "mm_processor_kwargs",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "routed_experts_prompt_start",
        "store",
        "stream_interval",
        "verbosity",
        "vllm_xargs",
        "web_search_options",
    )
)
"""Fields whose loss changes no promise: under `--unknown-fields warn` they are ignored at any value."""

REASONS = {
    "conversation": "conversations are not kept here, only responses: send previous_response_id or all items",
    "context_management": "contexts are not compacted here",
    "truncation": "items are not dropped from the beginning of a conversation",
    "prompt": "prompt templates are not kept here",
    "max_tokens": "the field for it is max_output_tokens",
    "function_call": "tool_choice is its successor",
    "functions": "tools are their successor",
}
"""Explanations for fields whose absence needs one."""


def is_one_of(value: object, accepted: tuple[Any, ...]) -> bool:
    """True if a value is one of these, 1 and true being different."""
    return any(type(value) is type(other) and value == other for other in accepted)
