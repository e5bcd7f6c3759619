"""GGUF blocks that stay packed: the integers and scales of each format, and models beside their expanded forms."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Encoding

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.folder import model_folder
from mini_infer_engine.kernels.gemm.grouped_weight import dequantized_groups
from mini_infer_engine.layers.cpu_nibbles import CpuNibblesMethod, keep_nibbles, multiplies_nibbles
from mini_infer_engine.layers.grouped import GroupedMethod
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.quantization.gguf_blocks import FORMS, in_one_form
from mini_infer_engine.runtime.model_runner import ModelRunner
from tests.support.gguf_files import encode, write_gguf
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
TOLERANCE = 1e-3
"""Relative error of logits in fp32: random K-quants make large activations."""
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
MIXED = {"blk.0.attn_v.weight": Encoding.Q6_K, "blk.0.ffn_down.weight": Encoding.Q6_K}
"""The tensors that llama.cpp's Q4_K_M stores in more bits."""
HAS_NIBBLES = multiplies_nibbles(16, 32, torch.bfloat16)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_rows(name: str, rows: int = 6, columns: int = 512, seed: int = 0) -> np.ndarray:
    weight = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    return encode(weight, Encoding[name], seed)


def largest_error(runner: ModelRunner, expected: torch.Tensor) -> float:
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", FORMS)
def test_blocks_decode_to_the_weights_of_the_gguf_package_when_scales_stay_wide(name: str) -> None:
    rows = random_rows(name)
    weight = FORMS[name].grouped(torch.from_numpy(rows), torch.float32)
    expected = gguf.dequantize(rows, Encoding[name])
    assert np.array_equal(dequantized_groups(weight).numpy(), expected)


@pytest.mark.parametrize("name", FORMS)
def test_rounding_of_scales_loses_less_than_bf16_does_when_the_model_is_bf16(name: str) -> None:
    rows = random_rows(name)
    weight = FORMS[name].grouped(torch.from_numpy(rows), torch.bfloat16)
    assert weight.scales.dtype == torch.float16
    expected = torch.from_numpy(gguf.dequantize(rows, Encoding[name]))
    assert (dequantized_groups(weight) - expected).abs().max() <= expected.abs().max() * 2.0**-9


def test_scales_stay_wide_when_fp16_cannot_represent_them() -> None:
    rows = random_rows("Q4_K").reshape(-1, 144)
    rows[:, :2] = np.array([2000.0], np.float16).view(np.uint8)  # times a scale of up to 63
    weight = FORMS["Q4_K"].grouped(torch.from_numpy(rows.reshape(6, -1)), torch.bfloat16)
    assert weight.scales.dtype == torch.float32


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", ["Q4_0", "Q4_K", "Q6_K"])
def test_weights_are_unchanged_when_they_get_a_common_form(first: str, second: str) -> None:
    both = [FORMS[name].grouped(torch.from_numpy(random_rows(name)), torch.float32) for name in (first, second)]
    joined = in_one_form(both)
    assert (joined[0].kind, joined[0].group) == (joined[1].kind, joined[1].group)
    for before, after in zip(both, joined, strict=True):
        assert torch.equal(dequantized_groups(after), dequantized_groups(before))


@pytest.mark.skipif(not HAS_NIBBLES, reason="torch has no fast int4 product for this processor")
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.group == 32])
def test_products_equal_those_of_dequantised_weights_when_torch_multiplies_packed_integers(name: str) -> None:
    weight = FORMS[name].grouped(torch.from_numpy(random_rows(name, rows=48)), torch.bfloat16)
    layer = Linear(512, 48)
    layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    keep_nibbles(layer, weight)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.float() @ dequantized_groups(weight).t()
    assert (layer(x).float() - expected).abs().max() <= expected.abs().max() * 0.01


@pytest.mark.parametrize("encoding", [Encoding.Q4_0, Encoding.Q8_0, Encoding.Q4_K])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers_when_blocks_stay_packed(encoding: Encoding, tied: bool, tmp_path: Path) -> None:
    changes = WIDE | {"tie_word_embeddings": tied}
    model = write_gguf(tmp_path / "m.gguf", "llama", encoding=encoding, encodings=MIXED, **changes)
    expected = reference_logits(model, TOKENS)
    runner = tiny_runner(model_folder(tmp_path / "m.gguf"), gguf_blocks="packed")
    layer = runner.worker.model.layers[0]
    assert isinstance(layer.self_attn.qkv_proj.method, GroupedMethod)
    assert runner.worker.model.embeddings.has_groups
    assert largest_error(runner, expected) <= TOLERANCE
    expanded = tiny_runner(model_folder(tmp_path / "m.gguf"), gguf_blocks="expanded")
    assert runner.worker.weight_bytes < expanded.worker.weight_bytes / 2
    assert largest_error(expanded, expected) <= TOLERANCE


@pytest.mark.skipif(not HAS_NIBBLES, reason="torch has no fast int4 product for this processor")
def test_layers_without_a_kernel_are_expanded_when_blocks_are_auto_on_a_cpu(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", "llama", encoding=Encoding.Q4_0, encodings=MIXED, **WIDE)
    expected = reference_logits(model, TOKENS)
    runner = tiny_runner(model_folder(tmp_path / "m.gguf"), dtype="bfloat16")
    first, second = runner.worker.model.layers
    assert isinstance(second.self_attn.qkv_proj.method, CpuNibblesMethod)
    assert isinstance(second.mlp.down_proj.method, CpuNibblesMethod)
    assert not isinstance(first.self_attn.qkv_proj.method, CpuNibblesMethod)  # groups of 16 columns
    expanded = tiny_runner(model_folder(tmp_path / "m.gguf"), dtype="bfloat16", gguf_blocks="expanded")
    assert largest_error(runner, expected) <= 2 * largest_error(expanded, expected) + 0.01


def test_experts_and_their_routers_are_right_when_blocks_stay_packed(tmp_path: Path) -> None:
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "hidden_size": 64}
    changes |= {"norm_topk_prob": True, "decoder_sparse_step": 1}
    encodings = dict.fromkeys(("blk.0.ffn_down_exps.weight", "blk.1.ffn_gate_exps.weight"), Encoding.Q4_0)
    model = write_gguf(
        tmp_path / "m.gguf", "qwen3moe", encoding=Encoding.Q8_0, encodings=encodings, packs_experts=True, **changes
    )
    runner = tiny_runner(model_folder(tmp_path / "m.gguf"), gguf_blocks="packed")
    moe = runner.worker.model.layers[1].mlp
    assert [stack.kind for stack in moe.weights()] == ["int8", "int8"]
    assert [stack.kind for stack in runner.worker.model.layers[0].mlp.weights()] == ["int8", "int4"]
    assert largest_error(runner, reference_logits(model, TOKENS)) <= TOLERANCE


def test_packed_blocks_are_refused_by_name_when_a_model_has_none(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "folder", "llama")
    with pytest.raises(ModelError, match="gguf_blocks = 'packed'"):
        tiny_runner(tmp_path / "folder", gguf_blocks="packed")
    write_gguf(tmp_path / "m.gguf", "llama")
    with pytest.raises(ModelError, match="gguf_blocks = 'packed'"):
        tiny_runner(model_folder(tmp_path / "m.gguf"), gguf_blocks="packed", quantization="int8")
