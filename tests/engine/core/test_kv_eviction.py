"""When a sequence loses cached tokens, as tables: numbers of tokens alone decide."""

import pytest

from mini_infer_engine.config.options.kv_policies import KVPolicy
from mini_infer_engine.core.kv_eviction import NEVER, chunk_before_compaction, most_excess, next_compaction

SNAPKV = KVPolicy("snapkv", 100)
STREAMING = KVPolicy("streaming-llm", 100)


@pytest.mark.parametrize(("budget", "excess"), [(5, 16), (256, 16), (1024, 64), (2048, 128), (100_000, 128)])
def test_a_cache_exceeds_its_budget_by_a_sixteenth_within_bounds(budget: int, excess: int) -> None:
    assert most_excess(budget) == excess


@pytest.mark.parametrize(
    ("policy", "num_prompt", "num_computed", "num_evicted", "expected"),
    [
        (None, 500, 0, 0, NEVER),
        (SNAPKV, 500, 0, 0, 500),
        (SNAPKV, 500, 200, 0, 500),
        (SNAPKV, 500, 500, 400, NEVER),
        (SNAPKV, 101, 0, 0, 101),
        (SNAPKV, 100, 0, 0, NEVER),
        (STREAMING, 500, 0, 0, 500),
        (STREAMING, 500, 500, 400, 516),
        (STREAMING, 500, 510, 400, 516),
        (STREAMING, 500, 516, 416, 532),
        (STREAMING, 100, 0, 0, 116),
        (STREAMING, 7, 50, 0, 116),
    ],
)
def test_prompts_are_compacted_at_their_end_and_outputs_each_time_they_exceed_the_budget(
    policy: KVPolicy | None, num_prompt: int, num_computed: int, num_evicted: int, expected: int
) -> None:
    assert next_compaction(policy, num_prompt, num_computed, num_evicted) == expected


@pytest.mark.parametrize(
    ("policy", "start", "count", "end", "expected"),
    [
        (SNAPKV, 0, 500, 500, 500),
        (SNAPKV, 0, 600, 500, 500),
        (SNAPKV, 0, 300, 500, 300),
        (SNAPKV, 0, 450, 500, 432),
        (SNAPKV, 432, 60, 500, 0),
        (SNAPKV, 432, 68, 500, 68),
        (SNAPKV, 100, 332, 500, 332),
        (STREAMING, 0, 499, 500, 499),
        (STREAMING, 490, 20, 500, 10),
    ],
)
def test_a_chunk_leaves_all_observed_tokens_to_the_last(
    policy: KVPolicy, start: int, count: int, end: int, expected: int
) -> None:
    assert chunk_before_compaction(policy, start, count, end) == expected
