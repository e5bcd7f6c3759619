"""Which stage has which layers: all of them once, and the stages take as long as each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_engine.config.parallelism.pipeline_parallel import split_layers


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head_layers", "sizes"),
    [
        (3, 1, 0.5, [3]),
        (3, 2, 0.4, [2, 1]),
        (4, 2, 0.0, [2, 2]),
        (48, 2, 2.8, [25, 23]),  # Qwen2.5-14B
        (28, 2, 2.3, [15, 13]),  # Qwen2.5-7B
        (28, 4, 2.3, [7, 8, 8, 5]),
        (5, 4, 0.0, [1, 1, 2, 1]),
        (4, 4, 9.0, [1, 1, 1, 1]),
        (6, 2, 30.0, [5, 1]),  # a small model with a large vocabulary
    ],
)
def test_the_last_pipeline_stage_has_fewer_layers_because_of_the_head(
    num_layers: int, num_stages: int, head_layers: float, sizes: list[int]
) -> None:
    assert [len(stage) for stage in split_layers(num_layers, num_stages, head_layers)] == sizes


@given(st.integers(1, 80), st.integers(1, 16), st.floats(0, 40))
def test_every_layer_is_in_one_pipeline_stage_in_order(num_layers: int, num_stages: int, head_layers: float) -> None:
    if num_stages > num_layers:
        with pytest.raises(ValueError, match="choose a smaller --pipeline-parallel-size"):
            split_layers(num_layers, num_stages, head_layers)
        return
    stages = split_layers(num_layers, num_stages, head_layers)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert all(stages)
    if num_stages > 1:
        others = [len(stage) for stage in stages[:-1]]
        assert max(others) - min(others) <= 1
        assert len(stages[-1]) <= max(others) + 1
