"""vLLM's Python API: each public name works here, or its error says what to use instead."""

from importlib import import_module
from typing import Any

import pytest

import mini_infer_engine
from mini_infer_engine import LLM, BeamSearchParams, SamplingParams, TextPrompt, TokensPrompt
from mini_infer_engine.offline import vllm_surface
from mini_infer_engine.offline.settings import settings_of

EXPORTS = [
    *("LLM", "SamplingParams", "BeamSearchParams", "RequestOutput", "CompletionOutput", "TextPrompt", "TokensPrompt"),
    *("EmbeddingOutput", "EmbeddingRequestOutput", "StructuredOutputsParams", "AsyncLLM", "AsyncLLMEngine"),
    *("AsyncEngineArgs", "EngineArgs", "LLMEngine", "LoRARequest", "ModelRegistry", "PoolingParams", "PoolingOutput"),
    *("PoolingRequestOutput", "ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput", "PromptType"),
    *("ScoringRequestOutput", "initialize_ray_cluster"),
]
"""Of the module `vllm`, and what its users import beside it."""
LLM_METHODS = [
    *("generate", "chat", "embed", "beam_search", "get_tokenizer", "get_default_sampling_params", "get_metrics"),
    *("reset_prefix_cache", "encode", "score", "classify", "reward", "sleep", "wake_up", "start_profile"),
    *("stop_profile", "collective_rpc", "apply_model", "llm_engine", "set_tokenizer", "preprocess_chat", "enqueue"),
    *("wait_for_completion", "get_world_size", "reset_mm_cache", "init_weight_transfer_engine", "update_weights"),
    *("from_engine_args",),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="dry", max_model_len=512, max_num_seqs=8)


@pytest.mark.parametrize("name", EXPORTS)
def test_each_vllm_name_is_exported_or_its_error_has_a_remedy(name: str) -> None:
    if name in mini_infer_engine.__all__:
        assert getattr(mini_infer_engine, name) is not None
        assert name in dir(mini_infer_engine)
        return
    with pytest.raises(ImportError) as caught:
        exec(f"from mini_infer_engine import {name}", {})
    assert name in str(caught.value)
    assert vllm_surface.NAMES[name] in str(caught.value)


@pytest.mark.parametrize("name", LLM_METHODS)
def test_each_method_of_vllms_llm_exists_or_its_error_has_a_remedy(llm: LLM, name: str) -> None:
    if name in dir(llm):
        assert callable(getattr(llm, name))
        return
    with pytest.raises(AttributeError) as caught:
        getattr(llm, name)
    assert f"LLM.{name}" in str(caught.value)
    assert vllm_surface.METHODS[name] in str(caught.value)


def test_unknown_names_raise_attribute_error(llm: LLM) -> None:
    assert not hasattr(llm, "nothing_of_that_name")
    assert not hasattr(mini_infer_engine, "nothing_of_that_name")
    assert import_module("mini_infer_engine").__version__


NEUTRAL: dict[str, list[Any]] = {
    "spaces_between_special_tokens": [True],
    "logits_processors": [None, []],
    "truncate_prompt_tokens": [None],
    "output_kind": [None, 0, 1, 2],
    "extra_args": [None, {}],
    "guided_decoding": [None],
    "skip_reading_prefix_cache": [None, False],
    "flat_logprobs": [False],
    "skip_clone": [False, True],
    "best_of": [None, 1],
    "thinking_token_budget": [None],
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_sampling_params_of_vllms_are_taken_when_they_ask_for_nothing(llm: LLM, name: str) -> None:
    for value in NEUTRAL[name]:
        (output,) = llm.generate("one", SamplingParams(max_tokens=2, **{name: value}), use_tqdm=False)
        assert output.outputs[0].text == "on"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spaces_between_special_tokens", False),
        ("logits_processors", [print]),
        ("truncate_prompt_tokens", 5),
        ("extra_args", {"a": 1}),
        ("guided_decoding", object()),
        ("skip_reading_prefix_cache", True),
        ("flat_logprobs", True),
        ("best_of", 4),
        ("thinking_token_budget", 5),
    ],
)
def test_sampling_params_of_vllms_are_refused_by_name_when_they_ask_for_something(
    llm: LLM, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(ValueError, match=name):
        llm.generate("one", params, use_tqdm=False)


def test_keywords_of_vllms_methods_are_taken_when_they_ask_for_nothing(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=2)
    llm.generate("one", greedy, use_tqdm=False, tokenization_kwargs=None)
    beams = BeamSearchParams(beam_width=1, max_tokens=1)
    for call, keywords in (
        (lambda **value: llm.embed("x", False, **value), {"pooling_params": 5}),
        (lambda **value: llm.beam_search("x", beams, **value), {"lora_request": 5}),
        (lambda **value: llm.generate("x", greedy, False, **value), {"tokenization_kwargs": {"a": 1}}),
        (lambda **value: llm.chat([{"role": "user", "content": "x"}], greedy, False, **value), {"chat_template": "x"}),
    ):
        with pytest.raises(ValueError, match=next(iter(keywords))):
            call(**keywords)
        with pytest.raises(TypeError, match="nonsense"):
            call(nonsense=1)


def test_chat_takes_vllms_keywords_when_they_ask_for_nothing(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "hello"}],
        SamplingParams(max_tokens=2),
        use_tqdm=False,
        chat_template=None,
        chat_template_content_format="auto",
        mm_processor_kwargs=None,
        tokenization_kwargs=None,
    )
    assert output.finished


@pytest.mark.parametrize(
    "keywords",
    [
        {"runner": "pooling"},
        {"task": "embed"},
        {"convert": "embed"},
        {"load_format": "safetensors"},
        {"structured_outputs_config": {"backend": "xgrammar"}},
        {"structured_outputs_config": {"backend": "auto", "disable_any_whitespace": False}},
    ],
)
def test_keywords_of_vllms_llm_are_taken_when_they_ask_for_nothing(keywords: dict[str, Any]) -> None:
    settings_of("dry", keywords)


def test_request_output_metrics_have_the_requests_times(llm: LLM) -> None:
    (output,) = llm.generate("three", SamplingParams(max_tokens=3), use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.num_generation_tokens == 3
    assert metrics.first_token_ts is not None
    assert metrics.last_token_ts is not None
    assert metrics.queued_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.first_token_latency == pytest.approx(metrics.first_token_ts - metrics.queued_ts)


def test_the_prefix_cache_is_empty_when_it_was_reset(llm: LLM) -> None:
    prompt = TokensPrompt(prompt_token_ids=list(range(65, 65 + 48)))
    params = SamplingParams(max_tokens=1)
    llm.generate(prompt, params, use_tqdm=False)
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 0


def test_get_metrics_counts_generated_tokens(llm: LLM) -> None:
    def generated() -> float:
        return next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:generation_tokens")

    before = generated()
    llm.generate(TextPrompt(prompt="three"), SamplingParams(max_tokens=3), use_tqdm=False)
    assert generated() == before + 3
