"""GLM's and MiniMax's configs: published files and transformers' own are read alike, and what is not computed is
refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.rope import RopeParameters
from mini_infer_engine.layers.head_order import head_order
from mini_infer_engine.models.glm4_moe import Glm4MoeConfig
from mini_infer_engine.models.registry import model_class, read_config

GLM_4_5_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def config_of(folder: Path, published: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(published | changes))
    return read_config(folder)


def test_the_config_of_glm_is_read_when_it_is_the_published_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, GLM_4_5_AIR)
    assert isinstance(config, Glm4MoeConfig)
    assert (config.ropes[0].partial, config.ropes[0].theta, config.ropes[0].interleaved) == (0.5, 1e6, False)
    assert config.sparse_layers == frozenset(range(1, 46))
    assert (config.moe.num_experts, config.moe.num_shared, config.moe.scoring) == (128, 1, "sigmoid")
    assert (config.qkv_bias, config.output_bias, config.has_qk_norm) == (True, False, False)
    new = {"rope_theta": ..., "partial_rotary_factor": ..., "rope_scaling": ...}
    kept = {key: value for key, value in GLM_4_5_AIR.items() if key not in new}
    rope = {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5}
    assert config_of(tmp_path, kept, rope_parameters=rope) == config, "transformers 5 has the rotation in an object"


def test_the_config_of_minimax_is_read_when_it_is_the_published_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, MINIMAX_M2)
    assert config.ropes[0].rotary_dim(config.head_dim) == 64
    assert config.quantization is not None
    kept = {key: value for key, value in MINIMAX_M2.items() if key != "rotary_dim"}
    assert config_of(tmp_path, kept, partial_rotary_factor=0.5).ropes == config.ropes


def test_minimax_is_refused_when_transformers_would_rotate_whole_heads(tmp_path: Path) -> None:
    config_of(tmp_path, MINIMAX_M2)
    with pytest.raises(ModelError, match="rotary_dim"):
        read_config(tmp_path, "transformers")


@pytest.mark.parametrize(
    ("published", "changes", "named"),
    [
        (GLM_4_5_AIR, {"scoring_func": "softmax"}, "scoring_func"),
        (GLM_4_5_AIR, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (GLM_4_5_AIR, {"n_group": 3}, "n_group"),
        (GLM_4_5_AIR, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (GLM_4_5_AIR, {"use_qk_norm": "yes"}, "use_qk_norm"),
        (GLM_4_5_AIR, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (MINIMAX_M2, {"qk_norm_type": "per_head"}, "qk_norm_type"),
        (MINIMAX_M2, {"use_routing_bias": False}, "use_routing_bias"),
        (MINIMAX_M2, {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        (MINIMAX_M2, {"attn_type_list": [0, 1]}, "attn_type_list"),
        (MINIMAX_M2, {"rotary_dim": 256}, "partial_rotary_factor"),
        (MINIMAX_M2, {"rotary_dim": "half"}, "rotary_dim"),
    ],
)
def test_a_config_is_refused_by_name_when_it_asks_for_another_computation(
    published: dict[str, Any], changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=named):
        config_of(tmp_path, published, **changes)


@pytest.mark.parametrize("published", [GLM_4_5_AIR, MINIMAX_M2])
def test_layers_behind_the_last_one_are_not_read(published: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, published, num_hidden_layers=2)
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    assert model.is_unused("model.layers.2.eh_proj.weight")
    assert model.is_unused("model.layers.4.enorm.weight")
    assert not model.is_unused("model.layers.1.eh_proj.weight")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotated_pairs_are_half_a_head_apart_when_a_head_is_reordered(interleaved: bool) -> None:
    order = head_order(RopeParameters(partial=0.5, interleaved=interleaved), 16)
    assert order is not None
    pairs = list(zip(order[:8].tolist(), order[8:].tolist(), strict=True))
    expected = [(2 * i, 2 * i + 1) if interleaved else (i, i + 4) for i in range(4)]
    assert pairs[:4] == expected
    assert sorted(order.tolist()) == list(range(16))
    assert head_order(RopeParameters(), 16) is None
