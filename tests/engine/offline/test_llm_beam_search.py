"""Beam search on the demo model: the texts and scores of transformers' `num_beams`, whoever shares the batch."""

from typing import Any

import pytest
import torch
import transformers

from mini_infer_engine import LLM, BeamSearchParams, SamplingParams
from mini_infer_engine.core.request import EarlyStopping
from tests.support.demo_reference import reference_model

PROMPTS = (
    "The user asks for a list of names, which are sorted and then joined with a comma. How is that done?",
    "def add(left: int, right: int) -> int:\n",
)
CHAT = [{"role": "user", "content": "What is 2+2?"}]
"""Some of its beams end with EOS before MAX_TOKENS."""
MAX_TOKENS = 16
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_model_len=256, kv_cache_memory=60_000_000)


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model()


def beams_of_transformers(model: Any, prompt: list[int], **requested: Any) -> list[tuple[list[int], float]]:
    """Output tokens and scores, the best first."""
    width = requested.pop("width")
    eos = model.generation_config.eos_token_id
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([prompt]),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                num_beams=width,
                num_return_sequences=width,
                eos_token_id=eos,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                **requested,
            ),
        )
    found = []
    for row, score in zip(made.sequences[:, len(prompt) :].tolist(), made.sequences_scores.tolist(), strict=True):
        ends = [place for place, token in enumerate(row) if token in eos]
        found.append((row[: ends[0] + 1] if ends else row, score))
    return found


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [
        (2, 1.0, False),
        (3, 0.0, True),
        (4, 2.0, "never"),
        (4, -1.0, "never"),
        (5, 0.5, False),
        (8, 1.0, True),
    ],
)
def test_beams_equal_those_of_transformers(
    llm: LLM, reference: Any, width: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    params = BeamSearchParams(
        beam_width=width, max_tokens=MAX_TOKENS, length_penalty=length_penalty, early_stopping=early_stopping
    )
    one_token = SamplingParams(max_tokens=1)
    made = [*llm.generate(PROMPTS, one_token, use_tqdm=False), *llm.chat(CHAT, one_token, use_tqdm=False)]
    prompts = [one.prompt_token_ids for one in made]
    for token_ids, found in zip(
        prompts, llm.beam_search([{"prompt_token_ids": ids} for ids in prompts], params), strict=True
    ):
        expected = beams_of_transformers(
            reference, token_ids, width=width, length_penalty=length_penalty, early_stopping=early_stopping
        )
        assert [one.tokens[len(token_ids) :] for one in found.sequences] == [tokens for tokens, _ in expected]
        scores = [score for _, score in expected]
        # A negative penalty multiplies a score, and with it what fp32 makes of its sum.
        tolerance = TOLERANCE * max(1, MAX_TOKENS**-length_penalty)
        assert [one.score for one in found.sequences] == pytest.approx(scores, abs=tolerance)
        for one in found.sequences:
            assert one.cum_logprob == pytest.approx(one.score * (len(one.tokens) - len(token_ids)) ** length_penalty)
            assert len(one.logprobs) == len(one.tokens) - len(token_ids)
            reported = [
                position[token] for position, token in zip(one.logprobs, one.tokens[len(token_ids) :], strict=True)
            ]
            assert one.cum_logprob == pytest.approx(sum(logprob.logprob for logprob in reported))
        assert token_ids != prompts[-1] or any(one.finish_reason == "stop" for one in found.sequences)


def test_one_beam_equals_greedy_text_also_in_a_batch(llm: LLM) -> None:
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=MAX_TOKENS))
    for one, many in zip(greedy, found, strict=True):
        assert many.sequences[0].tokens == [*one.prompt_token_ids, *one.outputs[0].token_ids]
        assert many.sequences[0].text is not None
        assert many.sequences[0].text.endswith(one.outputs[0].text)


def test_a_beam_search_is_refused_when_the_pool_is_too_small(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"n is 500.*256"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=500, max_tokens=5))
    with pytest.raises(ValueError, match="max_tokens allows 200 beams"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=200, max_tokens=200))
    with pytest.raises(ValueError, match="beam_width is 0"):
        BeamSearchParams(beam_width=0, max_tokens=5)
