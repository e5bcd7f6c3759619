"""Checkpoints that compressed-tensors itself writes: logits are those of the weights that it reads in them."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(40)]
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
"""Rows of two and of three groups of 128; keys and values have 64 rows, half a block of 128."""
PRESETS = (
    *("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4"),
)
SCHEMES: dict[str, str | dict[str, Any]] = {name: name for name in PRESETS} | {
    # Of columns that stay in place: weight_g_idx, which test_integer_checkpoints.py has, is no longer written.
    "W4A16, act-order": {"num_bits": 4, "group_size": 128, "actorder": "weight"},
    "W4A16, asymmetric channels": {"num_bits": 4, "group_size": -1, "symmetric": False},
    "W8A16, channels": {"num_bits": 8, "group_size": -1},
}
"""Presets by name, and schemes of weights alone by their arguments."""


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_equal_those_of_the_decompressed_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install compressed-tensors")
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    from tests.support.compressed_tensors_checkpoints import quantize_folder, scheme_of

    # The package decompresses 4-bit floats to bf16, which rounds their products with NVFP4's scales.
    unpack = partial(unpack_fp4_from_uint8, dtype=torch.float32)
    monkeypatch.setattr("compressed_tensors.compressors.nvfp4.base.unpack_fp4_from_uint8", unpack)
    model = save_tiny_model(tmp_path, "qwen2", **SHAPE)
    unquantised = reference_logits(model, TOKENS)
    model.load_state_dict(quantize_folder(tmp_path, copy.deepcopy(model), scheme_of(SCHEMES[name])), strict=False)
    expected = reference_logits(model, TOKENS)
    assert (expected - unquantised).abs().max() > 1e-2
    runner = tiny_runner(tmp_path)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(40), [17, 1, 22])
    assert (actual - expected).abs().max() <= 1e-3
