"""Embeddings of the demo model: transformers' last hidden states, of length 1, whoever shares the batch."""

import math
from typing import Any

import pytest
import torch

from mini_infer_engine import LLM, SamplingParams
from tests.support.demo_reference import reference_model

PROMPTS = [
    "The user asks for a list of names, which are sorted and then joined with a comma. How is that done?",
    "Join",
    "def add(left: int, right: int) -> int:\n    return left",
]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_model_len=256, kv_cache_memory=60_000_000, long_prefill_token_threshold=9)


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model()


def test_embeddings_equal_transformers_last_hidden_states(llm: LLM, reference: Any) -> None:
    for _ in range(2):  # the second finds the prompts in the cache, and computes the last token all the same
        found = llm.embed(PROMPTS, use_tqdm=False)
        for prompt, one in zip(PROMPTS, found, strict=True):
            with torch.inference_mode():
                hidden = reference.model(torch.tensor([one.prompt_token_ids])).last_hidden_state[0, -1]
            expected = torch.nn.functional.normalize(hidden, dim=0).tolist()
            assert one.outputs.embedding == pytest.approx(expected, abs=TOLERANCE), prompt
            assert math.hypot(*one.outputs.embedding) == pytest.approx(1)


def test_embeddings_and_texts_are_unchanged_when_they_share_a_batch(llm: LLM) -> None:
    alone = [one.outputs.embedding for one in llm.embed(PROMPTS, use_tqdm=False)]
    text = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0].outputs[0]
    for one, expected in zip(llm.embed(PROMPTS, use_tqdm=False), alone, strict=True):
        assert one.outputs.embedding == pytest.approx(expected, abs=TOLERANCE)  # now the prompts are in the cache
    assert llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0].outputs[0] == text
    with pytest.raises(ValueError, match="prompt 0"):
        llm.embed({"prompt_token_ids": []}, use_tqdm=False)
