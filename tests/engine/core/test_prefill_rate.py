"""The rate at which prompts are computed, as load reports tell it: wherever a runner spends its time."""

import time
from typing import Any

import pytest

from mini_infer_engine.core.request import Request, SamplingParams
from tests.support.engine_world import make_engine

PASS_S = 0.02


@pytest.mark.parametrize("step_depth", [0, 1])
@pytest.mark.parametrize("slow", ["launch", "collect"])
def test_prefill_rate_counts_a_pass_from_its_launch(
    slow: str, step_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU computes within the launch, a GPU until what it has made is collected."""
    engine, runner = make_engine(64, 16, 1000, step_depth=step_depth, max_num_batched_tokens=128)
    real = getattr(runner, slow)

    def slowly(*arguments: Any) -> Any:
        time.sleep(PASS_S)
        return real(*arguments)

    monkeypatch.setattr(runner, slow, slowly)
    engine.add(Request(request_id="a", prompt_token_ids=list(range(3, 500)), sampling=SamplingParams(max_tokens=1)))
    while engine.has_work:
        engine.step()
    assert 0 < engine.load().prefill_tokens_per_s < 1.3 * 128 / PASS_S
