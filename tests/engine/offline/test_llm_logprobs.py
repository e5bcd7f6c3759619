"""Log probabilities, biases and bans through `LLM`, on the demo model: equal to transformers' log-softmax."""

from typing import Any

import pytest

from mini_infer_engine import LLM, SamplingParams
from tests.support.demo_reference import log_softmax, reference_model

PROMPT = "The user asks for a list of names, which are sorted and then joined with a comma. How is that done?"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_model_len=256, kv_cache_memory=60_000_000, long_prefill_token_threshold=7)


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_and_prompt_logprobs_equal_the_models(llm: LLM, reference: Any, temperature: float) -> None:
    sampling_params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=12, logprobs=5, prompt_logprobs=2, top_p=0.9
    )
    for _ in range(2):  # the second finds the prompt in the cache, and computes it all the same
        found = llm.generate([PROMPT, PROMPT + " Then"], sampling_params, use_tqdm=False)
        for one in found:
            made = one.outputs[0]
            assert made.logprobs is not None
            assert one.prompt_logprobs is not None
            exact = log_softmax(reference, [*one.prompt_token_ids, *made.token_ids])
            assert len(made.logprobs) == len(made.token_ids)
            assert one.prompt_logprobs[0] is None
            assert len(one.prompt_logprobs) == len(one.prompt_token_ids)
            positions = [*one.prompt_logprobs[1:], *made.logprobs]
            for index, (reported, token) in enumerate(
                zip(positions, [*one.prompt_token_ids[1:], *made.token_ids], strict=True)
            ):
                assert reported is not None
                row = exact[index]
                assert reported[token].rank == int((row > row[token]).sum()) + 1
                expected = 5 if index >= len(one.prompt_token_ids) - 1 else 2
                best = row.topk(expected).indices.tolist()
                assert set(reported) == {token, *best}
                for token_id, logprob in reported.items():
                    assert logprob.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
            total = sum(reported[token].logprob for reported, token in zip(made.logprobs, made.token_ids, strict=True))
            assert made.cumulative_logprob == pytest.approx(total)


def test_logit_bias_allowed_tokens_and_bad_words_decide_the_tokens(llm: LLM) -> None:
    plain = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0].outputs[0]
    expected = next(token for token in range(300, 400) if token not in plain.token_ids)

    def made(**fields: Any) -> list[int]:
        sampling_params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **fields)
        return llm.generate(PROMPT, sampling_params, use_tqdm=False)[0].outputs[0].token_ids

    assert made(logit_bias={expected: 100.0}) == [expected] * 8
    assert plain.token_ids[0] not in made(logit_bias={plain.token_ids[0]: -100.0})
    allowed = [expected, expected + 1, expected + 5]
    assert set(made(allowed_token_ids=allowed)) <= set(allowed)
    pair = plain.token_ids[2:4]
    reported = made(bad_words_token_ids=[pair])
    assert reported[:3] == plain.token_ids[:3]
    assert all(reported[index : index + 2] != pair for index in range(8))
    sampling_params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=0)
    longer = llm.generate(PROMPT, sampling_params, use_tqdm=False)[0].outputs[0]
    assert longer.logprobs is not None
    tokens = zip(longer.logprobs, longer.token_ids, strict=True)
    word = next(text for reported, token in tokens if (text := reported[token].decoded_token or "").strip().isalpha())
    sampling_params = SamplingParams(temperature=0.0, max_tokens=60, bad_words=[word.strip()])
    without = llm.generate(PROMPT, sampling_params, use_tqdm=False)[0].outputs[0].text
    assert word in longer.text
    assert f" {word.strip()} " not in without


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprobs": 21}, ["logprobs is 21", "20"]),
        ({"prompt_logprobs": -2}, ["prompt_logprobs is -2"]),
        ({"logit_bias": {10**7: 1.0}}, ["logit_bias", "10000000"]),
        ({"logit_bias": {5: 101.0}}, ["logit_bias", "101"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids is empty"]),
        ({"bad_words": ["x", ""]}, ["bad_words holds an empty word"]),
        ({"bad_words_token_ids": [[]]}, ["bad_words", "empty"]),
    ],
)
def test_logprob_parameters_are_refused_by_name_when_they_are_invalid(
    llm: LLM, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="prompt 0") as raised:
        llm.generate(PROMPT, SamplingParams(**fields), use_tqdm=False)
    for word in words:
        assert word in str(raised.value)


def test_logprobs_of_named_tokens_have_no_rank(llm: LLM) -> None:
    sampling_params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=0, logprob_token_ids=[3, 1900])
    every = SamplingParams(temperature=0.0, max_tokens=3, logprobs=-1)
    named, whole = (
        llm.generate(PROMPT, requested, use_tqdm=False)[0].outputs[0] for requested in (sampling_params, every)
    )
    assert named.token_ids == whole.token_ids
    assert named.logprobs is not None
    assert whole.logprobs is not None
    for reported, all_tokens, token in zip(named.logprobs, whole.logprobs, named.token_ids, strict=True):
        assert set(reported) == {token, 3, 1900}
        assert reported[token].rank == 1
        for one in {3, 1900} - {token}:
            assert reported[one].rank is None
            assert reported[one].logprob == pytest.approx(all_tokens[one].logprob)
