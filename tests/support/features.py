"""What can be combined: one line a feature. `tests/engine/test_features.py` tries each pair; docs/features.md tells it.

A feature is settings of an engine, fields of a request, a model, or another kind of request. To add one, add its line
here and run `python -m tests.engine.test_features`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mini_infer_engine import SamplingParams
from mini_infer_engine.structured.params import StructuredOutputsParams
from tests.support.tiny_models import DEEPSEEK

Check = Callable[[Any], bool]
"""Of one output: whether the feature shows in it."""


@dataclass(frozen=True, eq=False)
class Feature:
    """One row and column."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the engine. `pages`: its KV cache has so many."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of the request."""
    architecture: tuple[str, dict[str, Any]] | None = None
    """Of a random model instead of the demo's: transformers' name, and what of its shape matters."""
    kind: str = "generate"
    """Of request: generate, beam_search or embed."""
    keeps_text: bool = True
    """Whether the same tokens come out with it as without it."""
    shows: Check = lambda output: True
    guesses: bool = False
    """Whether tokens are guessed with it: then always, however long passes take, and there must be guesses."""
    prefill_apart: bool = False
    """Whether another engine of this process computes the prompts: on GPUs tests/gpu2 has two processes for that."""
    is_long: bool = False
    """True if prompts are twice as long with it: what it changes begins there."""
    returns: bool = False
    """True if prompts come again when the device has no block of theirs any more, and these outputs count: blocks must
    have come from main memory."""
    gpus: int = 1
    """That it takes, where it is tried on GPUs."""


FEATURES: tuple[Feature, ...] = (
    Feature("prefix cache", {"enable_prefix_caching": True}),
    Feature("chunked prefill", {"max_num_batched_tokens": 32}),
    Feature("preemption and swap", {"pages": 11, "page_size": 16, "kv_swap_memory": 50_000_000}),
    Feature("INT8 weights", {"quantization": "int8"}, keeps_text=False),
    Feature("FP8 weights", {"quantization": "fp8"}, keeps_text=False),
    Feature("INT4 weights", {"quantization": "int4", "quantization_calibration": "none"}, keeps_text=False),
    Feature("INT8 keys and values", {"kv_cache_dtype": "int8"}, keeps_text=False),
    Feature("FP8 keys and values", {"kv_cache_dtype": "fp8"}, keeps_text=False),
    Feature("INT4 tier in main memory", {"enable_prefix_caching": True, "kv_host_memory": 40_000_000,
            "kv_tier_dtype": "int4", "page_size": 16}, keeps_text=False, returns=True),
    Feature("page selection", {"kv_selection": "quest", "kv_selection_budget": 64, "page_size": 16},
            keeps_text=False, is_long=True),
    Feature("eviction: SnapKV", sampling={"kv_policy": "snapkv", "kv_budget": 72}, keeps_text=False, is_long=True),
    Feature("eviction: StreamingLLM", sampling={"kv_policy": "streaming-llm", "kv_budget": 48}, keeps_text=False,
            is_long=True),
    Feature("speculation: look-up", {"speculative_method": "ngram", "prompt_lookup_min": 1}, guesses=True),
    Feature("speculation: draft model", {"speculative_model": "demo-draft"}, guesses=True),
    Feature("speculation: head", {"speculative_method": "head", "speculative_model": "demo-head"}, guesses=True),
    Feature("mixture of experts", architecture=("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48}), keeps_text=False),
    Feature("latent attention", architecture=("deepseek_v2", DEEPSEEK), keeps_text=False),
    Feature("log probabilities", sampling={"logprobs": 2}, shows=lambda output: len(output.outputs[0].logprobs) > 0),
    Feature("prompt log probabilities", sampling={"prompt_logprobs": 1},
            shows=lambda output: len(output.prompt_logprobs) == len(output.prompt_token_ids)),
    Feature("seeded sampling", sampling={"temperature": 0.9, "top_p": 0.95, "seed": 3}, keeps_text=False),
    Feature("penalties", sampling={"repetition_penalty": 1.3, "frequency_penalty": 0.2}, keeps_text=False),
    Feature("logit bias", sampling={"logit_bias": {40: 6.0, 41: -6.0}}, keeps_text=False),
    Feature("allowed tokens", sampling={"allowed_token_ids": list(range(30, 120))}, keeps_text=False,
            shows=lambda output: set(output.outputs[0].token_ids) <= set(range(30, 120))),
    Feature("structured output", sampling={"structured_outputs": StructuredOutputsParams(regex="[a-c]{9}")},
            keeps_text=False, shows=lambda output: set(output.outputs[0].text) <= set("abc")),
    Feature("beam search", kind="beam_search"),
    Feature("embeddings", kind="embed"),
    Feature("prefill and decode apart", prefill_apart=True),
    Feature("data parallel", {"data_parallel_size": 2}, gpus=2),
    Feature("tensor parallel", {"tensor_parallel_size": 2}, gpus=2),
    Feature("pipeline parallel", {"pipeline_parallel_size": 2}, gpus=2),
)  # fmt: skip


def sampling_of(features: list[Feature]) -> SamplingParams:
    """Of a request with all of these; greedy unless one says otherwise."""
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    for feature in features:
        fields |= feature.sampling
    return SamplingParams(**fields)
