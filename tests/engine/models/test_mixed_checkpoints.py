"""Checkpoints whose layers have different schemes: logits are those of the weights that they stand for."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.models.decoder import DecoderModel
from tests.support import fp8_checkpoints
from tests.support.mixed_checkpoints import Group, quantize_folder, quantize_gptq_folder, quantize_modelopt_folder
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = "_proj"
MIXES: dict[str, list[Group]] = {
    "4 and 8 bits": [Group("w8a16-packed", ("re:.*down_proj",), ("down_proj",)), Group("w4a16", ("Linear",), (ALL,))],
    "W8A8 and asymmetric groups": [
        Group("w8a8", ("re:.*self_attn.*",), tuple(f"self_attn.{part}_proj" for part in "qkvo")),
        Group("w4a16-asymmetric", ("re:.*mlp.*",), MLP),
    ],
    "NVFP4 and FP8": [
        Group("compressed-channel", ("re:.*down_proj",), ("down_proj",)),
        Group("nvfp4", ("re:.*self_attn.*", r"re:.*(gate|up)_proj"), (ALL,)),
    ],
    "three, and one layer's own": [
        Group("compressed-tensor", ("model.layers.1.mlp.down_proj",), ("layers.1.mlp.down_proj",)),
        Group("compressed-block", (r"re:.*self_attn\.o_proj$",), ("o_proj",)),
        Group("w4a16-act-order", ("Linear",), (ALL,)),
    ],
    "MXFP4, and a layer of plain weights": [
        Group("", ("re:.*layers.0.*down_proj",), ("layers.0.mlp.down_proj",)),
        Group("mxfp4", ("Linear",), (ALL,)),
    ],
}


def logits_of(folder: Path) -> torch.Tensor:
    runner = tiny_runner(folder)
    return run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_logits_equal_those_of_the_dequantised_weights(architecture: str, mix: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, architecture)
    unquantised = reference_logits(model, TOKENS)
    model.load_state_dict(quantize_folder(tmp_path, MIXES[mix]), strict=False)
    expected = reference_logits(model, TOKENS)
    assert (expected - unquantised).abs().max() > 1e-2
    assert (logits_of(tmp_path) - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("form", ["compressed-channel", "w4a16", "nvfp4"])
def test_an_lm_head_can_be_a_quantisation_target(form: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "llama")
    groups = [Group(form, ("lm_head",), ("lm_head",)), Group("w8a8", ("Linear",), (ALL,))]
    exact = quantize_folder(tmp_path, groups, ignore=())
    assert not torch.equal(exact["lm_head.weight"], model.lm_head.weight)
    model.load_state_dict(exact, strict=False)
    assert (logits_of(tmp_path) - reference_logits(model, TOKENS)).abs().max() <= 1e-3


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_experts_can_have_their_own_scheme(architecture: str, tmp_path: Path) -> None:
    """Targets are the checkpoint's names, which Mixtral's layers do not have here."""
    shape = {"qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}}
    save_tiny_model(tmp_path, architecture, num_hidden_layers=2, **shape.get(architecture, {}))
    attention = Group("w4a16", ("re:.*self_attn.*",), (ALL,))
    experts = Group("nvfp4a16", (r"re:.*experts\..*(_proj|\.w[123])$",), (*MLP, ".w1", ".w2", ".w3"))
    exact = quantize_folder(tmp_path, [experts, attention])
    actual = logits_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in exact.items()}, tmp_path / "model.safetensors")
    assert (actual - logits_of(tmp_path)).abs().max() <= 1e-3


@pytest.mark.parametrize(
    ("architecture", "groups", "words"),
    [
        (
            "llama",
            [Group("w8a8", ("re:.*v_proj",), ("v_proj",)), Group("w4a16", ("Linear",), (ALL,))],
            ["layers.0.self_attn.q_proj (target 'Linear')", "layers.0.self_attn.v_proj (target 're:.*v_proj')"],
        ),
        (
            "llama",
            [Group("w4a16", ("re:.*(q|k|v|o|up|down)_proj",), (ALL,))],
            ["layers.0.mlp.gate_proj (no target)", "layers.0.mlp.up_proj (target"],
        ),
        (
            "mixtral",
            [Group("w8a8", (r"re:.*experts\.2\.w2",), ("experts.2.w2",)), Group("w4a16", ("Linear",), (ALL, "w1"))],
            ["layers.0.block_sparse_moe.experts.0.w1 (target 'Linear')", "layers.0.block_sparse_moe.experts.2.w2 ("],
        ),
    ],
)
def test_loading_is_refused_when_layers_of_one_gemm_have_different_schemes(
    architecture: str, groups: list[Group], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, architecture)
    quantize_folder(tmp_path, groups)
    monkeypatch.setattr(DecoderModel, "take_memory", None)  # said before memory is taken
    with pytest.raises(ModelError, match="different schemes") as raised:
        tiny_runner(tmp_path)
    for word in words:
        assert word in str(raised.value)


def test_gptqmodels_dynamic_rules_change_and_skip_layers(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "llama")
    dynamic: dict[str, dict[str, Any]] = {
        r"-:model\.layers\.2\.self_attn\..*": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": -1},
        r".*\.layers\.1\..*": {"desc_act": True, "sym": False},
    }

    def form_of(layer: str) -> dict[str, Any] | None:
        if not layer.endswith(ALL) or "layers.2.self_attn" in layer:
            return None
        return (
            dynamic[r"+:.*\.down_proj"] if "down" in layer else dynamic[r".*\.layers\.1\..*"] if ".1." in layer else {}
        )

    exact = quantize_gptq_folder(tmp_path, dynamic, form_of)
    model.load_state_dict(exact, strict=False)
    assert (logits_of(tmp_path) - reference_logits(model, TOKENS)).abs().max() <= 1e-3


def test_modelopts_mixed_precision_lists_layers(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "llama")

    def form_of(layer: str) -> str | None:
        if not layer.endswith(ALL) or layer == "model.layers.1.self_attn.o_proj":
            return None
        return "NVFP4" if ".mlp." in layer else "FP8"

    model.load_state_dict(quantize_modelopt_folder(tmp_path, form_of), strict=False)
    assert (logits_of(tmp_path) - reference_logits(model, TOKENS)).abs().max() <= 1e-3


@pytest.mark.parametrize("form", ["compressed-channel", "fp8-tensor"])
@pytest.mark.parametrize("kept", ["auto", "fp8"])
def test_kv_scales_are_ignored_with_a_log_line(
    form: str, kept: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama")
    fp8_checkpoints.quantize_folder(tmp_path, form)
    expected = run_chunks(
        runner := tiny_runner(tmp_path, kv_cache_dtype=kept), TOKENS, PageDealer(runner).table(40), [40]
    )
    names = [
        *("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale", "self_attn.k_proj.k_scale"),
        *("self_attn.kv_scale", "self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ]
    scales = {f"model.layers.{layer}.{name}": torch.full((1,), 0.5) for layer in range(3) for name in names}
    save_file(load_file(tmp_path / "model.safetensors") | scales, tmp_path / "model.safetensors")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        runner = tiny_runner(tmp_path, kv_cache_dtype=kept)
    messages = [record.getMessage() for record in caplog.records if "scales of keys and values" in record.getMessage()]
    assert len(messages) == 1
    assert messages[0].startswith("21 scales")
    assert torch.equal(run_chunks(runner, TOKENS, PageDealer(runner).table(40), [40]), expected)
