"""Configs of families that others' layers compute: published fields are read, and other computations are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.models.sparse_decoder import SparseConfig

COMMON: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def config_of(folder: Path, architecture: str, **changes: Any) -> ModelConfig:
    values = COMMON | {"architectures": [architecture]} | changes
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


def test_olmo_3_scales_the_rotation_of_full_layers_alone_when_the_file_has_one_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    config = config_of(tmp_path, "Olmo3ForCausalLM", rope_theta=5e5, rope_scaling=scaling, sliding_window=8)
    assert [rope.type for rope in config.ropes] == ["default"] * 3 + ["yarn"]
    assert config.sliding_windows == (8, 8, 8, None)
    assert config.max_position_embeddings == 128


def test_exaone_rotates_layers_with_a_window_alone_when_there_are_some(tmp_path: Path) -> None:
    config = config_of(tmp_path, "Exaone4ForCausalLM", sliding_window=8)
    assert [rope.type for rope in config.ropes] == ["default"] * 3 + ["none"]
    config = config_of(tmp_path, "Exaone4ForCausalLM", sliding_window=None)
    assert {rope.type for rope in config.ropes} == {"default"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {1, 2, 3}),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": 2}, {0, 1, 2}),
        ({"moe_layer_interval": 2, "moe_layer_end_index": -1}, {1, 3}),
    ],
)
def test_ernie_has_mixtures_between_the_first_and_the_last_such_layer(
    changes: dict[str, Any], expected: set[int], tmp_path: Path
) -> None:
    config = config_of(tmp_path, "Ernie4_5_MoeForCausalLM", **changes)
    assert isinstance(config, SparseConfig)
    assert config.sparse_layers == expected
    assert (config.moe.num_shared, config.moe.scoring) == (2, "softmax")


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
        ("OlmoeForCausalLM", {"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        ("Dots1ForCausalLM", {"scoring_func": "softmax", "num_experts_per_tok": 2}, "scoring_func"),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": True}, "use_sliding_window"),
        ("Ernie4_5_MoeForCausalLM", {"moe_k": 65}, "moe_k"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias"),
        ("SeedOssForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("SolarOpenForCausalLM", {"num_experts_per_tok": 129}, "num_experts_per_tok"),
    ],
)
def test_a_config_is_refused_by_name_when_it_asks_for_another_computation(
    architecture: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        config_of(tmp_path, architecture, **changes)
