"""The demo model with what is shipped to guess for it: the same answers, and many guesses right."""

from typing import Any

import pytest

from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.llm import LLM
from mini_infer_engine.speculation.controller import DraftController

QUESTION = [{"role": "user", "content": "What does functools.partial do?"}]


def answer(**options: Any) -> tuple[str, float]:
    """The text, and the share of guesses that were right."""
    llm = LLM("demo", device="cpu", kv_cache_memory=32_000_000, max_model_len=512, **options)
    (made,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)
    stats = llm._engine.stats()
    return made.outputs[0].text, sum(stats.accepted_tokens_by_position) / max(1, stats.draft_tokens)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"speculative_config": {"method": "draft_model", "model": "demo-draft"}}, 0.4),
        ({"speculative_method": "head", "speculative_model": "demo-head"}, 0.1),
    ],
    ids=["draft", "head"],
)
def test_the_demo_models_draft_and_head_guess_what_it_says(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], least: float
) -> None:
    monkeypatch.setattr(DraftController, "choose", lambda self, acceptances, num_rows=None: self.levels[-1])
    plain, _ = answer()
    guessed, share = answer(**options)
    assert guessed == plain
    assert share > least
