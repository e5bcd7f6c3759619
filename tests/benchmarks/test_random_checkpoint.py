"""Checkpoints of random weights, which our engine reads; integers are what compressed-tensors' documentation says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mini_infer_engine.config.quantization.integer import IntegerScheme
from mini_infer_engine.models.registry import read_config
from tests.engine.server.dry_server import ROOT
from tests.support.integer_checkpoints import packed
from tests.support.tiny_models import PageDealer, run_chunks, tiny_runner

sys.path.insert(0, str(ROOT / "benchmarks"))

from common import random_checkpoint
from common.models import CONFIGS, model_folder
from common.random_checkpoint import write_random_checkpoint

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
CHANNELS = {"num_bits": 8, "strategy": "channel"}
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
W8A8 = CHANNELS | {"input_activations": TOKEN}
CPU = torch.device("cpu")
MIXTURE = CONFIGS["tiny"] | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def written(root: Path, weights: dict[str, Any] | None, model: str = "tiny") -> tuple[Path, dict[str, Tensor]]:
    """The tiny shape's folder, and all its tensors."""
    folder = root / "packed"
    size = write_random_checkpoint(Path(model_folder(model, root)), folder, weights, CPU)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found = load_file(file)
        assert {index["weight_map"][name] for name in found} == {file.name}
        tensors |= found
    assert index["metadata"]["total_size"] == size == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    return folder, tensors


def dequantised(tensors: dict[str, Tensor], weights: dict[str, Any]) -> dict[str, Tensor]:
    """As documented: words hold integers plus half their range, the first in the lowest bits; times scales."""
    bits, found = weights["num_bits"], {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            found[name] = tensor * tensors[f"{name}_scale"].float()
            continue
        path, _, part = name.rpartition(".weight_")
        if part != "packed":
            found |= {} if part in ("scale", "shape") else {name: tensor}
            continue
        rows, columns = tensors[f"{path}.weight_shape"].tolist()
        unsigned = torch.stack([(tensor.long() >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)], -1)
        integers = unsigned.flatten(1)[:, :columns]
        assert torch.equal(packed(integers, bits, 1), tensor)
        scales = tensors[f"{path}.weight_scale"].float()
        assert scales.shape == (rows, columns // weights.get("group_size", columns))
        found[f"{path}.weight"] = (integers - (1 << (bits - 1))) * scales.repeat_interleave(
            columns // scales.shape[1], 1
        )
    return found


@pytest.mark.parametrize("weights", [CHANNELS, GROUPS, W8A8], ids=["int8", "int4", "w8a8-int8"])
def test_a_random_checkpoint_is_read_by_our_engine(
    weights: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_checkpoint, "_SHARD_BYTES", 20_000)
    folder, tensors = written(tmp_path, weights)
    assert len(list(folder.glob("*.safetensors"))) > 2
    plain = dequantised(tensors, weights)
    assert plain["model.layers.1.mlp.down_proj.weight"].shape == (64, 96)
    assert 0.015 < float(plain["model.layers.1.mlp.down_proj.weight"].std()) < 0.025

    unquantised = tmp_path / "plain"
    unquantised.mkdir()
    save_file({name: tensor.float().contiguous() for name, tensor in plain.items()}, unquantised / "model.safetensors")
    (unquantised / "config.json").write_text(json.dumps(CONFIGS["tiny"]))
    logits = []
    for directory in (folder, unquantised):
        runner = tiny_runner(directory, dtype="float32")
        logits.append(run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22]))
    assert (logits[0] - logits[1]).abs().max() <= 1e-4
    assert logits[0].abs().max() > 1e-2


def test_a_packed_layer_has_the_documented_tensors_and_no_others(tmp_path: Path) -> None:
    _, tensors = written(tmp_path, GROUPS)
    of_layer = {name: tensor for name, tensor in tensors.items() if ".0.mlp.gate_proj." in name}
    path = "model.layers.0.mlp.gate_proj"
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in of_layer.items()} == {
        f"{path}.weight_packed": (torch.int32, (96, 64 // 8)),
        f"{path}.weight_scale": (torch.bfloat16, (96, 64 // 32)),
        f"{path}.weight_shape": (torch.int64, (2,)),
    }
    others = {name for name in tensors if ".weight_" not in name}
    assert all(name.endswith(("norm.weight", "_proj.bias", "embed_tokens.weight")) for name in others)
    words = of_layer[f"{path}.weight_packed"]
    assert (words < 0).float().mean() > 0.3, "the highest bits are random, too"


def test_mxfp4_experts_have_random_values_of_a_usual_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "vocab_size": 200,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    layers = {"layer_types": CONFIGS["gpt-oss-20b"]["layer_types"][:2]}
    monkeypatch.setitem(CONFIGS, "gpt-oss-tiny", CONFIGS["gpt-oss-20b"] | small | heads | layers)
    folder, tensors = written(tmp_path, None, "gpt-oss-tiny")
    path = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales = tensors[f"{path}_blocks"], tensors[f"{path}_scales"]
    assert (blocks.dtype, scales.dtype, blocks.shape[:-1]) == (torch.uint8, torch.uint8, scales.shape)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(blocks & 7).long()] * 2.0 ** (scales.float()[..., None] - 127)
    assert 0.015 < float(values.square().mean().sqrt()) < 0.03
    runner = tiny_runner(folder, dtype="float32")
    logits = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    assert logits.isfinite().all()
    assert logits.abs().max() > 1e-2


def test_w8a8_has_bytes_with_a_scale_a_channel_and_says_that_tokens_are_rounded(tmp_path: Path) -> None:
    folder, tensors = written(tmp_path, W8A8)
    path = "model.layers.0.mlp.gate_proj"
    of_layer = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items() if path in name}
    assert of_layer == {
        f"{path}.weight": (torch.int8, (96, 64)),
        f"{path}.weight_scale": (torch.bfloat16, (96, 1)),
    }
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (quantization["quant_method"], quantization["format"], quantization["ignore"]) == (
        "compressed-tensors",
        "int-quantized",
        ["lm_head"],
    )
    assert quantization["config_groups"]["group_0"] == {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": TOKEN,
        "output_activations": None,
    }
    schemes = read_config(folder).quantization
    assert schemes is not None
    scheme = schemes.scheme_of(path)
    assert isinstance(scheme, IntegerScheme)
    assert scheme.int8_activations


LATENT = json.loads(json.dumps(CONFIGS["deepseek-v2-lite"])) | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.mark.parametrize("model", ["tiny", "tiny-mixture", "tiny-latent"])
def test_plain_weights_are_whole_and_spread(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture's router must send different tokens to different experts, or its passes read a few experts alone."""
    monkeypatch.setitem(CONFIGS, "tiny-mixture", MIXTURE)
    monkeypatch.setitem(CONFIGS, "tiny-latent", LATENT)
    folder, tensors = written(tmp_path, None, model)
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    runner = tiny_runner(folder, dtype="float32")
    logits = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [40])
    assert logits.isfinite().all()
    assert logits.abs().max() > 1e-2
    if model == "tiny-mixture":
        embedded = tensors["model.embed_tokens.weight"].float()
        embedded /= embedded.pow(2).mean(dim=1, keepdim=True).sqrt()
        chosen = (embedded @ tensors["model.layers.0.mlp.gate.weight"].float().T).topk(2).indices.unique()
        assert len(chosen) == MIXTURE["num_experts"]
