"""Checkpoints of MLX, bitsandbytes and HQQ: logits are those of the weights that they stand for."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from tests.support.tiny_models import LFM2, PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(30)]
Tensors = dict[str, torch.Tensor]
NF4 = [
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0),
]
"""About the table of nf4; a checkpoint has its own."""
LINEAR = re.compile(r".*(_proj|\.w[123]|embed_tokens|lm_head)\.weight")


def mlx(name: str, weight: torch.Tensor, bits: int, group: int) -> tuple[Tensors, torch.Tensor]:
    """Integers as one number of all bits of a row, cut into words from the lowest on."""
    path, (rows, columns) = name.removesuffix(".weight"), weight.shape
    groups = weight.view(rows, columns // group, group)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-6)
    integers = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 2**bits - 1).long()
    words = np.zeros((rows, columns * bits // 32), dtype=np.uint32)
    for row, values in enumerate(integers.view(rows, columns).tolist()):
        stream = sum(value << (bits * place) for place, value in enumerate(values))
        words[row] = [(stream >> (32 * place)) & 0xFFFFFFFF for place in range(words.shape[1])]
    tensors = {f"{path}.weight": torch.from_numpy(words), f"{path}.scales": scales, f"{path}.biases": low}
    return tensors, (integers * scales[..., None] + low[..., None]).view(rows, columns)


def bits_of_4(name: str, weight: torch.Tensor, *, nested: bool) -> tuple[Tensors, torch.Tensor]:
    table, size = torch.tensor(NF4), 64
    numbers = weight.flatten()
    blocks = numbers.view(-1, size)
    scales = blocks.abs().amax(-1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "dtype": "float32", "shape": list(weight.shape)}
    tensors: Tensors = {f"{name}.quant_map": table}
    if nested:
        offset, outer_size, outer_table = float(scales.mean()), 256, torch.linspace(-1, 1, 256)
        outer = torch.stack([part.abs().max() for part in (scales - offset).split(outer_size)])
        spread = outer.repeat_interleave(outer_size)[: len(scales)]
        codes = ((scales - offset) / spread)[:, None].sub(outer_table).abs().argmin(-1)
        scales = outer_table[codes] * spread + offset
        state |= {"nested_blocksize": outer_size, "nested_offset": offset, "nested_dtype": "float32"}
        tensors[f"{name}.absmax"] = codes.to(torch.uint8)
        tensors |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": outer_table}
    else:
        tensors[f"{name}.absmax"] = scales
    indexes = (blocks / scales[:, None])[..., None].sub(table).abs().argmin(-1).flatten()
    packed = (indexes[0::2] << 4 | indexes[1::2]).to(torch.uint8)
    content = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {name: packed[:, None], f"{name}.quant_state.bitsandbytes__nf4": content}
    return tensors, (table[indexes].view(-1, size) * scales[:, None]).view(weight.shape)


def bits_of_8(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    path, most = name.removesuffix(".weight"), weight.abs().amax(-1)
    integers = (weight / most[:, None] * 127).round().to(torch.int8)
    tensors = {name: integers, f"{path}.SCB": most, f"{path}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, integers.float() * most[:, None] / 127


def hqq(name: str, weight: torch.Tensor, bits: int, axis: int) -> tuple[Tensors, torch.Tensor]:
    """Groups of 32 numbers as rows (axis 1) or columns; the first part of the rows is in the highest bits."""
    path, most = name.removesuffix(".weight"), 2**bits - 1
    groups = weight.reshape(-1, 32) if axis else weight.reshape(32, -1)
    low, high = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
    scale = (high - low) / most
    zero = -low / scale
    integers = (groups / scale + zero).round().clamp(0, most).to(torch.uint8)
    packed = torch.zeros_like(integers[: len(integers) * bits // 8])
    for place, part in enumerate(integers.split(len(packed))):
        packed |= part << (8 - bits * (place + 1))
    numbers = {"nbits": bits, "axis": axis, "group_size": 32, "channel_wise": 1, "view_as_float": 0}
    tensors = {f"{path}.{part}": torch.tensor([number], dtype=torch.int32) for part, number in numbers.items()}
    tensors |= {f"{path}.W_q": packed, f"{path}.scale": scale, f"{path}.zero": zero}
    tensors[f"{path}.shape"] = torch.tensor(weight.shape, dtype=torch.int32)
    return tensors, ((integers - zero) * scale).reshape(weight.shape)


def hqq_config(bits: int) -> dict[str, Any]:
    quant_config = {"weight_quant_params": {"nbits": bits, "group_size": 32}, "scale_quant_params": None}
    return {"quantization_config": {"quant_method": "hqq", "quant_config": quant_config, "skip_modules": ["lm_head"]}}


MIXED = {"group_size": 32, "bits": 4, "model.layers.0.mlp.down_proj": {"group_size": 16, "bits": 8}}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FORMS: dict[str, tuple[dict[str, Any], Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]]] = {
    **{
        f"mlx {bits} bits": (
            {"quantization": {"group_size": 32, "bits": bits}},
            lambda name, weight, bits=bits: mlx(name, weight, bits, 32),
        )
        for bits in (2, 3, 4, 5, 6, 8)
    },
    "mlx mixed": (
        {"quantization": MIXED, "quantization_config": MIXED},
        lambda name, weight: mlx(name, weight, *((8, 16) if "layers.0.mlp.down_proj" in name else (4, 32))),
    ),
    **{
        f"hqq {bits} bits, axis {axis}": (
            hqq_config(bits),
            lambda name, weight, bits=bits, axis=axis: hqq(name, weight, bits, axis),
        )
        for bits, axis in ((8, 1), (4, 1), (4, 0), (2, 1))
    },
    "nf4": ({"quantization_config": BITSANDBYTES}, lambda name, weight: bits_of_4(name, weight, nested=False)),
    "nf4 twice": ({"quantization_config": BITSANDBYTES}, lambda name, weight: bits_of_4(name, weight, nested=True)),
    "int8": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        lambda name, weight: bits_of_8(name, weight),
    ),
}


def has_plain_head(config: dict[str, Any]) -> bool:
    return "quant_method" in config.get("quantization_config", {})


def quantise(folder: Path, form: str, model: Any) -> None:
    """Quantises a folder, and gives transformers' model the weights that it stands for."""
    config, quantised = FORMS[form]
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))
    tensors, state = load_file(folder / "model.safetensors"), model.state_dict()
    for name in list(tensors):
        if LINEAR.fullmatch(name) and not (has_plain_head(config) and ("embed" in name or "head" in name)):
            made, exact = quantised(name, tensors.pop(name))
            tensors |= made
            state[name].copy_(exact)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def largest_error(folder: Path, model: Any, **settings: Any) -> float:
    runner = tiny_runner(folder, **settings)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(30), [17, 1, 12])
    return float((actual - reference_logits(model, TOKENS)).abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_those_of_the_weights_when_a_checkpoint_is_widened(form: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=False)
    quantise(tmp_path, form, model)
    assert largest_error(tmp_path, model) <= 1e-3


def test_logits_equal_those_of_the_weights_when_a_hybrid_is_widened(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "lfm2", **LFM2)
    quantise(tmp_path, "mlx 4 bits", model)
    assert largest_error(tmp_path, model) <= 1e-3


def test_weights_are_quantised_again_when_a_widened_checkpoint_is_rounded(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen3")
    quantise(tmp_path, "mlx 8 bits", model)
    assert 1e-3 < largest_error(tmp_path, model, quantization="int8") < 1


BROKEN: dict[str, tuple[str, str, torch.Tensor | None, str]] = {
    "no biases": ("mlx 4 bits", "model.layers.1.mlp.up_proj.biases", None, r"up_proj\.weight.*scales and biases"),
    "other groups": ("mlx 4 bits", "model.layers.1.mlp.up_proj.scales", torch.ones(96, 3), "scales and biases"),
    "no scale": ("hqq 4 bits, axis 1", "model.layers.1.mlp.up_proj.scale", None, r"up_proj\.W_q.*scale is missing"),
    "bits": ("hqq 4 bits, axis 1", "model.layers.1.mlp.up_proj.nbits", torch.tensor([3]), "3 bits"),
    "shape": ("hqq 4 bits, axis 1", "model.layers.1.mlp.up_proj.shape", torch.tensor([96, 65]), r"\[96, 65\]"),
    "state": ("nf4", "model.layers.1.mlp.up_proj.weight.quant_state.bitsandbytes__nf4", torch.zeros(9).byte(), "state"),
    "short": ("nf4", "model.layers.1.mlp.up_proj.weight", torch.zeros(9, 1).byte(), r"\[96, 64\]"),
    "no table": ("nf4", "model.layers.1.mlp.up_proj.weight.quant_map", None, "quant_map"),
    "rows": ("int8", "model.layers.1.mlp.up_proj.SCB", torch.ones(5), "rows"),
    "order": ("int8", "model.layers.1.mlp.up_proj.weight_format", torch.tensor(1).byte(), "order"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_tensor_is_named_when_a_widened_checkpoint_is_broken(case: str, tmp_path: Path) -> None:
    form, name, replacement, named = BROKEN[case]
    quantise(tmp_path, form, save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=False))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    if replacement is not None:
        tensors[name] = replacement
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=named):
        tiny_runner(tmp_path)


@pytest.mark.parametrize(("kind", "twice"), [("nf4", False), ("nf4", True), ("fp4", True)])
def test_weights_equal_the_librarys_own_when_bitsandbytes_is_installed(kind: str, twice: bool, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs the package bitsandbytes")
    # Rows of whole blocks: on a CPU the library itself dequantises others wrongly.
    model = save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=False, intermediate_size=128, head_dim=16)
    fields = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": BITSANDBYTES}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        packed, quantised = functional.quantize_4bit(tensors[name], quant_type=kind, compress_statistics=twice)
        state[name].copy_(functional.dequantize_4bit(packed, quantised))
        tensors[name] = packed
        tensors |= {f"{name}.{key}": value for key, value in quantised.as_dict(packed=True).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert largest_error(tmp_path, model) <= 1e-3
