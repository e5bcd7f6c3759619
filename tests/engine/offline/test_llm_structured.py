"""Structured output of a real model: the demo's, on a CPU, beside requests that ask for nothing of the kind."""

import json
import re

import jsonschema
import pytest

from mini_infer_engine import LLM, SamplingParams, StructuredOutputsParams
from tests.support.grammars import SCHEMA

QUESTION = [{"role": "user", "content": "Which functions does textwrap have?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="demo", max_model_len=1024, max_num_seqs=16)


def test_outputs_are_unchanged_when_structured_and_free_ones_share_a_batch(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=24)
    alone = llm.chat(QUESTION, plain, use_tqdm=False)[0].outputs[0].token_ids
    requested = [
        *[SamplingParams(temperature=1, seed=seed, max_tokens=200, structured_outputs=_json()) for seed in range(6)],
        SamplingParams(temperature=0, max_tokens=200, structured_outputs=_json(), logprobs=1, presence_penalty=1.0),
        SamplingParams(temperature=1, seed=3, top_p=0.5, structured_outputs=StructuredOutputsParams(regex="v[0-9]{2}")),
        plain,
    ]
    *points, version, free = (
        output.outputs[0] for output in llm.chat([QUESTION] * len(requested), requested, use_tqdm=False)
    )
    for point in points:
        assert point.finish_reason == "stop"
        jsonschema.validate(json.loads(point.text), SCHEMA)
    assert re.fullmatch("v[0-9]{2}", version.text)
    assert free.token_ids == alone
    reported = points[-1].logprobs
    assert reported is not None
    assert len(reported) == len(points[-1].token_ids)


def test_a_seeded_structured_answer_is_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=11, max_tokens=200, structured_outputs=_json())
    [alone] = llm.chat(QUESTION, params, use_tqdm=False)
    company = llm.chat([QUESTION] * 5, params, use_tqdm=False)
    assert {one.outputs[0].text for one in company} == {alone.outputs[0].text}


def _json() -> StructuredOutputsParams:
    return StructuredOutputsParams(json=SCHEMA)
