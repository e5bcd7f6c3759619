"""The demo model with what is shipped to guess for it: the same answers, and many guesses right."""

from typing import Any

import pytest

from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.core.speculation.controller import DraftController
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.offline.llm import LLM
from mini_infer_engine.structured.params import StructuredOutputsParams
from tests.support.grammars import SCHEMA

QUESTION = [{"role": "user", "content": "What does functools.partial do?"}]


def answer(**options: Any) -> tuple[str, float]:
    """The text, and the share of guesses that were right."""
    llm = LLM("demo", device="cpu", kv_cache_memory=32_000_000, max_model_len=512, **options)
    (made,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)
    stats = llm._engine.stats()
    return made.outputs[0].text, sum(stats.accepted_tokens_by_position) / max(1, stats.draft_tokens)


def test_constrained_output_equals_the_plain_engines_when_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside free text, with what else a request may ask for; one ends by a stop token, one by the grammar."""
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])
    schema = StructuredOutputsParams(json=SCHEMA)
    pattern = StructuredOutputsParams(regex="v[0-9]{2,40}( [a-z]{1,30}){1,8}")
    requested = [
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=schema, logprobs=1),
        SamplingParams(temperature=1, seed=4, max_tokens=60, structured_outputs=schema, presence_penalty=1.0),
        SamplingParams(temperature=1, seed=3, max_tokens=40, structured_outputs=pattern, bad_words=["1", "99"]),
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=pattern, min_tokens=9, stop_token_ids=[10, 32]),
        SamplingParams(temperature=0, max_tokens=30),
    ]

    def answers(**options: Any) -> tuple[list[Any], list[list[tuple[int, float]]], EngineStats]:
        llm = LLM("demo", device="cpu", kv_cache_memory=32_000_000, max_model_len=512, **options)
        made = llm.chat([QUESTION] * len(requested), requested, use_tqdm=False)
        reported = [[one.outputs[0].token_ids, one.outputs[0].finish_reason, one.outputs[0].text] for one in made]
        first = made[0].outputs[0].logprobs
        assert first is not None
        numbers = [[(token, one.logprob) for token, one in sorted(entry.items())] for entry in first]
        return reported, numbers, llm._engine.stats()

    plain, plain_numbers, _ = answers()
    guessed, numbers, stats = answers(speculative_model="demo-draft")
    assert guessed == plain
    assert [[token for token, _ in entry] for entry in numbers] == [
        [token for token, _ in one] for one in plain_numbers
    ]
    for entry, expected in zip(numbers, plain_numbers, strict=True):
        assert [value for _, value in entry] == pytest.approx([value for _, value in expected], abs=0.01)
    assert stats.drafts > 40
    assert sum(stats.accepted_tokens_by_position) > 20


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"speculative_config": {"method": "draft_model", "model": "demo-draft"}}, 0.7),
        ({"speculative_method": "head", "speculative_model": "demo-head"}, 0.5),
    ],
    ids=["draft", "head"],
)
def test_the_demo_models_draft_and_head_are_accepted(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], least: float
) -> None:
    monkeypatch.setattr(DraftController, "choose", lambda self, *_, **__: self.levels[-1])
    plain, _ = answer()
    guessed, share = answer(**options)
    assert guessed == plain
    assert share > least
