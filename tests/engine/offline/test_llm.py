import gc
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mini_infer_engine import LLM, SamplingParams, StructuredOutputsParams

GREEDY = SamplingParams(temperature=0, max_tokens=100)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="dry", max_model_len=512, max_num_seqs=8)


def test_generate_accepts_text_ids_and_dicts_in_order(llm: LLM) -> None:
    prompts = [
        "one",
        {"prompt": "two"},
        {"prompt_token_ids": list(b"three")},
        {"prompt_token_ids": [52], "prompt": "4"},
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["one", "two", "three", "4"]
    assert [output.prompt for output in outputs] == ["one", "two", None, "4"]
    assert outputs[2].prompt_token_ids == list(b"three")
    assert all(output.finished and output.outputs[0].finish_reason == "stop" for output in outputs)
    assert llm.generate("alone", GREEDY, use_tqdm=False)[0].outputs[0].text == "alone"
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_each_prompt_can_have_its_own_sampling_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(stop=["e"]), SamplingParams(detokenize=False)]
    first, second, third = llm.generate(["three"] * 3, params, use_tqdm=False)
    assert (first.outputs[0].text, first.outputs[0].finish_reason) == ("th", "length")
    assert (second.outputs[0].text, second.outputs[0].stop_reason) == ("thr", "e")
    assert (third.outputs[0].text, third.outputs[0].token_ids[:5]) == ("", list(b"three"))


def test_chat_accepts_one_or_several_conversations(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hé"}]
    assert llm.chat(conversation, GREEDY, use_tqdm=False)[0].outputs[0].text == "You said: hé"
    assert len(llm.chat([conversation, conversation], GREEDY, use_tqdm=False)) == 2


def test_num_cached_tokens_grows_when_a_prompt_is_repeated(llm: LLM) -> None:
    prompt = "what is said twice is computed once, up to the last block"
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(prompt) // 16 * 16)
    assert first.outputs[0].text == second.outputs[0].text == prompt


def test_all_prompts_complete_when_there_are_more_than_pages_and_slots() -> None:
    small = LLM(model="dry", max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=20 * 16 * 16_384)
    assert small.settings.kv_cache_memory == 20 * 16 * 16_384
    prompts = [f"{index % 3} " + "x" * (index * 7 % 120) for index in range(40)]
    outputs = small.generate(prompts, SamplingParams(temperature=0, max_tokens=120), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [prompt[:120] for prompt in prompts]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "prompt 0: prompt"),
        (["ok", "x" * 600], GREEDY, "prompt 1.*600 tokens.*512"),
        ([{"prompt_token_ids": [5, 5000]}], GREEDY, "5000"),
        ([{}], GREEDY, "prompt 0 is neither"),
        ("x", SamplingParams(temperature=3), "temperature is 3"),
        (["x", "y"], [GREEDY], "2 prompts.*1"),
    ],
)
def test_generate_raises_value_error_and_goes_on_when_a_request_is_invalid(
    llm: LLM, prompts: object, params: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert llm.generate("still here", GREEDY, use_tqdm=False)[0].outputs[0].text == "still here"


def test_the_engine_is_idle_when_a_call_was_interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm._engine.step, iter(range(3))

    def interrupted() -> object:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a long prompt"] * 3, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert llm._engine.load().running + llm._engine.load().waiting <= 3
    assert llm.generate("again", GREEDY, use_tqdm=False)[0].outputs[0].text == "again"
    assert (llm._engine.load().running, llm._engine.load().kv_usage) == (0, 0)


def test_llm_names_a_setting_when_it_is_unknown_or_invalid() -> None:
    with pytest.raises(TypeError, match="tensor_parallel_sise"):
        LLM(model="dry", tensor_parallel_sise=2)
    with pytest.raises(ValueError, match="max_num_seqs"):
        LLM(model="dry", max_num_seqs="many")
    with pytest.raises(ValueError, match="no such folder"):
        LLM(model="/no/such/folder")


def test_vllms_keywords_are_accepted_when_they_are_neutral() -> None:
    off: dict[str, object] = {"tensor_parallel_size": 1, "trust_remote_code": False, "disable_log_stats": True}
    off |= {"swap_space": 4, "quantization": None, "kv_cache_dtype": "auto", "enable_chunked_prefill": True}
    assert LLM(model="dry", max_model_len=64, **off).settings == LLM(model="dry", max_model_len=64).settings


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cpu_offload_gb", 4, "leave it out, or at None or 0"),
        ("enable_chunked_prefill", False, "leave it out, or at None or True"),
        ("tokenizer", "other", "put tokenizer.json there"),
        ("download_dir", "/models", "set HF_HUB_CACHE"),
        ("dtype", "half", "choose from auto, float32, bfloat16 .*nothing is computed in float16"),
        ("max_model_len", -2, "is not an integer from 1 up to 16777216"),
        ("quantization", "awq", "choose from int8, .*leave it out"),
        ("max_num_seqs", 0, "is not an integer from 1 up to 65536"),
        ("gpu_memory_utilization", 0, "is not a number above 0 up to 1"),
        ("kv_cache_memory", 0, "is not a size in bytes from 1"),
        ("kv_cache_memory", "much", "is no size"),
    ],
)
def test_llm_names_a_setting_when_it_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"{name} .*{message}|{value!r} {message}"):
        LLM(model="dry", **{name: value})


def test_llm_accepts_vllms_names_and_values_of_settings() -> None:
    keywords: dict[str, object] = {"block_size": 32, "seed": None, "enable_prefix_caching": None, "swap_space": 8}
    keywords |= {
        "max_num_batched_tokens": -1,
        "tokenizer": "dry",
        "max_seq_len_to_capture": 8192,
        "task": "generate",
        "kv_cache_memory": "64MiB",
    }
    settings = LLM(model="dry", max_model_len=64, **keywords).settings
    assert (settings.page_size, settings.seed, settings.kv_cache_memory) == (32, 0, 2**26)
    with pytest.raises(TypeError, match="did you mean max_model_len"):
        LLM(model="dry", max_modellen=3)


def test_llm_accepts_a_path_object_as_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        LLM(tmp_path)
    with pytest.raises(TypeError, match="name a folder"):
        LLM(5)  # type: ignore[arg-type]  # what is tested


def test_n_outputs_of_a_prompt_are_returned_together(llm: LLM) -> None:
    """Each as if it had been asked for alone, with the next seed."""
    model = LLM("demo", kv_cache_memory=50_000_000)
    params = SamplingParams(n=3, temperature=1.5, seed=5, max_tokens=6, logprobs=0, prompt_logprobs=0)
    [several] = model.generate("import os", params, use_tqdm=False)
    assert [output.index for output in several.outputs] == [0, 1, 2]
    assert len({output.text for output in several.outputs}) > 1
    assert len(several.prompt_logprobs or ()) == len(several.prompt_token_ids)
    for output, seed in zip(several.outputs, (5, 6, 7), strict=True):
        params.n, params.seed = 1, seed
        assert model.generate("import os", params, use_tqdm=False)[0].outputs[0].token_ids == output.token_ids
    [first, second] = llm.generate(["ab", "cd"], [SamplingParams(n=2), SamplingParams()], use_tqdm=False)
    assert ([output.text for output in first.outputs], len(second.outputs)) == (["ab", "ab"], 1)


def test_sampling_params_can_be_changed_and_left_at_none(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.stop = 4, "re"  # type: ignore[assignment]  # one string stands for a list of one
    assert llm.generate("three", params, use_tqdm=False)[0].outputs[0].text == "th"
    nothing: dict[str, Any] = dict.fromkeys(("stop", "stop_token_ids", "bad_words", "logit_bias"))
    assert SamplingParams(**nothing) == SamplingParams()
    assert params.clone() == params
    assert llm.generate("x", SamplingParams(temperature=np.float32(0), max_tokens=np.int64(1)), use_tqdm=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": None}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [5]}, "stop"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_generate_names_a_sampling_parameter_when_its_type_is_wrong(
    llm: LLM, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate("x", SamplingParams(**changes), use_tqdm=False)
    assert llm._engine.load().running + llm._engine.load().waiting == 0


@pytest.mark.parametrize("params", [{"max_tokens": 1}, SamplingParams, [{"max_tokens": 1}], "greedy", 5])
def test_generate_raises_when_params_are_no_sampling_params(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match=r"give (one|SamplingParams)"):
        llm.generate("x", params, use_tqdm=False)


def test_generate_accepts_token_ids_as_lists_and_arrays(llm: LLM) -> None:
    for prompts in (list(b"ab"), [list(b"ab")], np.array(list(b"ab")), {"prompt_token_ids": np.array(list(b"ab"))}):
        [output] = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert output.outputs[0].text == "ab"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "give a text"),
        (5, "give a text"),
        ([None], "prompt 0 is neither"),
        ([["a", "b"]], "prompt 0.*'a'"),
        ("\ud800", "surrogate"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt"),
    ],
)
def test_generate_raises_when_a_prompt_is_invalid(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_prompts_share_no_prefix_when_their_salts_differ(llm: LLM) -> None:
    text = "said with one salt and then with another, longer than a block"
    prompts = [{"prompt": text, "cache_salt": salt} for salt in ("one", "other", "one")]
    cached = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for prompt in prompts]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_generate_needs_one_priority_per_prompt_and_refuses_adapters(llm: LLM) -> None:
    texts = [one.outputs[0].text for one in llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 0])]
    assert texts == ["a", "b"]
    with pytest.raises(ValueError, match=r"2 prompts.*1 priorities"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1])
    with pytest.raises(ValueError, match="they are integers"):
        llm.generate("a", GREEDY, use_tqdm=False, priority=["high"])  # type: ignore[list-item]  # what is tested
    with pytest.raises(ValueError, match="lora_request"):
        llm.generate("a", GREEDY, use_tqdm=False, lora_request="adapter")  # type: ignore[arg-type]
    assert llm.generate("a", GREEDY, use_tqdm=False, lora_request=None)


def test_a_given_chat_template_replaces_the_models(tmp_path: Path) -> None:
    source = "{% for message in messages %}{{ message.content }};{% endfor %}"
    (tmp_path / "template.jinja").write_text(source)
    for value in (source, str(tmp_path / "template.jinja")):
        model = LLM("dry", max_model_len=64, chat_template=value)
        [output] = model.chat([{"role": "user", "content": "hi"}] * 2, GREEDY, use_tqdm=False)
        assert output.prompt == "hi;hi;"
    with pytest.raises(ValueError, match="Jinja template"):
        LLM("dry", max_model_len=64, chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ValueError, match="chat template, line 1"):
        LLM("dry", max_model_len=64, chat_template="{% for %}")


def test_existing_objects_are_frozen_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer_engine.offline.loaded_model.gc", gc)
    seen: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: seen.append(gc.get_freeze_count()))
    try:
        gc.unfreeze()
        engine = LLM("dry")
        assert seen == [0], "garbage is collected before what is left is frozen"
        assert gc.get_freeze_count() > 0
        del engine
        assert gc.get_freeze_count() == 0, "cycles that hold weights are found again"
    finally:
        gc.freeze()


def test_threads_can_share_an_llm(llm: LLM) -> None:
    def send_request(index: int) -> list[str]:
        prompts = [f"thread {index}, prompt {number}" for number in range(3)]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    with ThreadPoolExecutor(4) as threads:
        for index, texts in enumerate(threads.map(send_request, range(12))):
            assert texts == [f"thread {index}, prompt {number}" for number in range(3)]


def test_get_tokenizer_returns_the_models_tokenizer() -> None:
    model = LLM("demo", kv_cache_memory=50_000_000)
    [output] = model.generate("import os", GREEDY.clone(), use_tqdm=False)
    assert model.get_tokenizer().encode("import os") == output.prompt_token_ids
    with pytest.raises(ValueError, match="pretends"):
        LLM("dry", max_model_len=64).get_tokenizer()


def test_generate_uses_token_ids_when_there_is_no_tokenizer() -> None:
    llm = LLM(model="dry", skip_tokenizer_init=True, max_model_len=512)
    output = llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.token_ids[:3]) == ("", [1, 2, 3])
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])


def test_outputs_match_schemas_regexes_and_choices(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    requested = [
        StructuredOutputsParams(choice=["red", "blue"]),
        StructuredOutputsParams(regex="[0-9]{4}"),
        StructuredOutputsParams(json=schema, disable_additional_properties=True),
    ]
    params = [SamplingParams(max_tokens=50, structured_outputs=one) for one in requested]
    color, digits, point = (output.outputs[0] for output in llm.generate(["prompt"] * 3, params, use_tqdm=False))
    assert color.text in ("red", "blue")
    assert digits.text.isdigit()
    assert isinstance(json.loads(point.text)["x"], int)
    assert {color.finish_reason, digits.finish_reason, point.finish_reason} == {"stop"}


def test_generate_raises_before_running_when_a_grammar_cannot_be_enforced(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(ValueError, match="prompt 1: structured_outputs"):
        llm.generate(["one", "two"], [GREEDY, params], use_tqdm=False)
    without = LLM(model="dry", max_model_len=64, skip_tokenizer_init=True)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        without.generate({"prompt_token_ids": [1]}, params, use_tqdm=False)
