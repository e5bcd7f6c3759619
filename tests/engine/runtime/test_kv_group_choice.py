"""Which features keep pages behind a sliding window, and that the log says so once."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.parallelism.pipeline_parallel import PipelineStage
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.memory.kv_group_choice import choose_kv_groups
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory: Path = tmp_path_factory.mktemp("gemma2")
    save_tiny_model(directory, "gemma2", head_dim=16, sliding_window=32)
    return read_config(directory)


def choose(config: ModelConfig, *, moves_kv: bool = False, **settings: Any) -> bool:
    """Whether the layout is uniform."""
    resolved = EngineSettings(model="any", **settings).resolved()
    return choose_kv_groups(resolved, config, moves_kv=moves_kv).is_uniform


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"disable_hybrid_kv_cache_manager": True}, "disable_hybrid_kv_cache_manager"),
        ({"moves_kv": True}, "KV transfer"),
        ({"speculative_model": "a smaller one"}, "speculative_method"),
        ({"kv_swap_memory": 1_000}, "kv_swap_memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layout_is_uniform_and_the_log_says_why_when_a_feature_knows_no_groups(
    config: ModelConfig, options: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert not choose(config)
    caplog.clear()
    assert choose(config, **options)
    (record,) = caplog.records
    assert named in record.getMessage()


def test_layout_is_uniform_when_the_model_has_several_stages(config: ModelConfig) -> None:
    assert choose(dataclasses.replace(config, stage=PipelineStage(0, 2, range(2))))
    assert not choose(dataclasses.replace(config, tensor_parallel=TensorParallel(0, 2)))


def test_layout_is_uniform_without_a_word_when_no_sequence_leaves_the_window(
    config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose(config, max_model_len=32)
    assert not caplog.records
    assert not choose(config, max_model_len=33)
