"""Preempted sequences whose pages wait in pinned main memory go on exactly where they were."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.request import Request
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.tiny_models import save_tiny_model

pytestmark = GPU_ONLY
PAGE_TOKENS = 16
POOL_PAGES = 60
"""Of 960 tokens: the longest request fits, a dozen do not."""


def requests() -> list[Request]:
    return mixed_requests(16, 199, 150, outputs=(40, 60))


COVERING = {"kv_selection": "quest", "kv_selection_budget": 256}
"""All pages are selected: the first token after a swap is attended to as a prompt is."""


@pytest.mark.parametrize(
    "changes",
    [
        {"step_depth": 0, "enable_prefix_caching": False},
        {"step_depth": 1, "enable_prefix_caching": False},
        {"step_depth": 1, "enable_prefix_caching": True},
        {"step_depth": 1, "enable_prefix_caching": True, **COVERING},
    ],
    ids=str,
)
def test_texts_are_those_of_a_pool_that_is_large_enough(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_tiny_model(tmp_path, "qwen3", head_dim=64, num_hidden_layers=4)
    common = {"page_size": PAGE_TOKENS, "max_model_len": 256, **changes}
    settings = make_settings(tmp_path, **common)
    roomy = make_runner(settings)
    expected = texts(make_engine(settings, roomy), requests())

    page_bytes = roomy.worker.page_bytes(PAGE_TOKENS)
    memory = {"kv_cache_memory": (POOL_PAGES + 1) * page_bytes, "kv_swap_memory": 4 * POOL_PAGES * page_bytes}
    settings = make_settings(tmp_path, **common, **memory)
    runner = make_runner(settings)
    assert runner.swap_space.num_pages == 4 * POOL_PAGES
    assert runner.pool.host_pages.is_pinned() == runner.pool.pages.is_cuda
    # A model so small is computed sooner than copied: that is the scheduler's choice, and not what is tested here.
    runner.swap_space = replace(runner.swap_space, swap_s_per_token=0.0, compute_s_per_token=1.0)
    engine = make_engine(settings, runner)
    assert texts(engine, requests()) == expected
    assert engine.scheduler.kv_cache.num_swaps > 0
    assert engine.scheduler.kv_cache.num_swaps == engine.stats().preemptions
    assert engine.stats().kv_tiers.tiers["swap"].mismatches == 0
