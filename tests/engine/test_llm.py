import json

import pytest

from mini_infer_engine import LLM, SamplingParams, StructuredOutputsParams

GREEDY = SamplingParams(temperature=0, max_tokens=100)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="dry", max_model_len=512, max_num_seqs=8)


def test_prompts_come_as_text_ids_or_dicts_and_keep_their_order(llm: LLM) -> None:
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


def test_each_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(stop=["e"]), SamplingParams(detokenize=False)]
    first, second, third = llm.generate(["three"] * 3, params, use_tqdm=False)
    assert (first.outputs[0].text, first.outputs[0].finish_reason) == ("th", "length")
    assert (second.outputs[0].text, second.outputs[0].stop_reason) == ("thr", "e")
    assert (third.outputs[0].text, third.outputs[0].token_ids[:5]) == ("", list(b"three"))


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hé"}]
    assert llm.chat(conversation, GREEDY, use_tqdm=False)[0].outputs[0].text == "You said: hé"
    assert len(llm.chat([conversation, conversation], GREEDY, use_tqdm=False)) == 2


def test_a_repeated_prompt_is_cached(llm: LLM) -> None:
    prompt = "what is said twice is computed once, up to the last block"
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(prompt) // 16 * 16)
    assert first.outputs[0].text == second.outputs[0].text == prompt


def test_more_prompts_than_pages_and_slots_all_come_true() -> None:
    small = LLM(model="dry", max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=20 * 16 * 16_384)
    assert small.settings.kv_cache_memory == 20 * 16 * 16_384
    prompts = [f"{index % 3} " + "x" * (index * 7 % 120) for index in range(40)]
    outputs = small.generate(prompts, SamplingParams(temperature=0, max_tokens=120), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [prompt[:120] for prompt in prompts]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "prompt 0: prompt has no tokens"),
        (["ok", "x" * 600], GREEDY, "prompt 1: prompt has 600 tokens.*512"),
        ([{"prompt_token_ids": [5, 5000]}], GREEDY, "5000"),
        ([{}], GREEDY, "prompt 0 is neither"),
        ("x", SamplingParams(temperature=3), "temperature is 3"),
        (["x", "y"], [GREEDY], "2 prompts and 1 sampling params"),
    ],
)
def test_bad_requests_are_value_errors_and_lose_nothing(
    llm: LLM, prompts: object, params: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert llm.generate("still here", GREEDY, use_tqdm=False)[0].outputs[0].text == "still here"


def test_an_interrupted_call_leaves_an_idle_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_unknown_and_wrong_settings_are_named() -> None:
    with pytest.raises(TypeError, match="tensor_parallel_sise"):
        LLM(model="dry", tensor_parallel_sise=2)
    with pytest.raises(ValueError, match="max_num_seqs"):
        LLM(model="dry", max_num_seqs="many")
    with pytest.raises(ValueError, match="no such folder"):
        LLM(model="/no/such/folder")


def test_vllms_keywords_are_accepted_where_they_ask_for_nothing() -> None:
    off: dict[str, object] = {"tensor_parallel_size": 1, "trust_remote_code": False, "disable_log_stats": True}
    off |= {"swap_space": 4, "quantization": None, "kv_cache_dtype": "auto", "enable_chunked_prefill": True}
    assert LLM(model="dry", max_model_len=64, **off).settings == LLM(model="dry", max_model_len=64).settings


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("cpu_offload_gb", 2, "0"),
        ("enable_chunked_prefill", False, "None or True"),
        ("cpu_offload_gb", 4, "0"),
    ],
)
def test_vllms_keywords_are_refused_where_they_ask_for_something(name: str, value: object, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value!r} is not supported: leave it out, or at {remedy}$"):
        LLM(model="dry", **{name: value})


def test_without_a_tokenizer_ids_go_in_and_come_out() -> None:
    llm = LLM(model="dry", skip_tokenizer_init=True, max_model_len=512)
    output = llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.token_ids[:3]) == ("", [1, 2, 3])
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match="tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])


def test_outputs_are_held_to_schemas_regexes_and_choices(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    asked = [
        StructuredOutputsParams(choice=["red", "blue"]),
        StructuredOutputsParams(regex="[0-9]{4}"),
        StructuredOutputsParams(json=schema, disable_additional_properties=True),
    ]
    params = [SamplingParams(max_tokens=50, structured_outputs=one) for one in asked]
    color, digits, point = (output.outputs[0] for output in llm.generate(["prompt"] * 3, params, use_tqdm=False))
    assert color.text in ("red", "blue")
    assert digits.text.isdigit()
    assert isinstance(json.loads(point.text)["x"], int)
    assert {color.finish_reason, digits.finish_reason, point.finish_reason} == {"stop"}


def test_what_cannot_be_enforced_is_said_before_anything_runs(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(ValueError, match="prompt 1: structured_outputs cannot be enforced"):
        llm.generate(["one", "two"], [GREEDY, params], use_tqdm=False)
    without = LLM(model="dry", max_model_len=64, skip_tokenizer_init=True)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        without.generate({"prompt_token_ids": [1]}, params, use_tqdm=False)
