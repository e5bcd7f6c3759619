"""Checkpoints that cannot be served: what is wrong is said, by name, before weights are read or memory is taken."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.registry import read_config
from tests.support.tiny_models import tiny_runner


def scheme_is_refused(folder: Path, scheme: dict[str, Any], words: Sequence[str]) -> None:
    """With this `quantization_config` a saved model's config is refused in these words."""
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantization_config") as raised:
        read_config(folder)
    for word in words:
        assert word in str(raised.value)


def tensor_is_named(
    folder: Path, name: str, wrong: torch.Tensor | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wrong tensor of the second layer's down_proj, or None for without it, a saved model is not loaded."""
    tensors = load_file(folder / "model.safetensors")
    path = f"model.layers.1.mlp.down_proj.{name}"
    del tensors[path]
    save_file(tensors | ({path: wrong} if wrong is not None else {}), folder / "model.safetensors")
    monkeypatch.setattr(DecoderModel, "take_memory", None)
    with pytest.raises(ModelError, match="down_proj") as raised:
        tiny_runner(folder)
    assert words in str(raised.value)
