"""A head's files are compared with its config and the model before memory is taken, and so are the model's own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine import LLM
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.speculation.head import HeadShape, SpeculativeHead, load_head

WEIGHTS = "model.safetensors"
SHAPE = HeadShape(hidden_size=16, width=8, intermediate_size=12, layers=(0, 2))
NAME = "down.weight"


def save(folder: Path, tensors: Callable[[dict[str, torch.Tensor]], Any] = lambda _: None, **changes: Any) -> Path:
    """A head with some of its config, or its tensors, changed."""
    folder.mkdir(exist_ok=True)
    state = SpeculativeHead(SHAPE).state_dict()
    tensors(state)
    save_file(state, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(SHAPE.to_config() | changes))
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> SpeculativeHead:
    return load_head(folder, 16, 3, torch.device("cpu"), dtype, dummy=False, seed=0)


def test_a_head_has_its_files_numbers_in_the_wanted_dtype(tmp_path: Path) -> None:
    head, stored = load(save(tmp_path), torch.bfloat16), load_file(tmp_path / WEIGHTS)
    assert {name: tensor.dtype for name, tensor in head.state_dict().items()} == dict.fromkeys(stored, torch.bfloat16)
    assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": [-1, 0]}, r"layers = \[-1, 0\]: they must be numbers from 0 in ascending order"),
        ({"layers": [2, 0]}, r"layers = \[2, 0\]"),
        ({"layers": [1, 1]}, r"layers = \[1, 1\]"),
        ({"layers": []}, r"layers = \[\]"),
        ({"layers": [0, 3]}, r"reads layers \[0, 3\] .* the model has 3 layers"),
        ({"width": -8}, "width = -8: it must be at least 1"),
        ({"width": 10**9}, r"tensor fuse.weight has shape \[8, 32\], config.json asks for \[1000000000, 32\]"),
        ({"width": "wide"}, "is no config.json of a speculative head"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"config.json is of \['Qwen3ForCausalLM'\], and a"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said) as raised:
        load(save(tmp_path, **changes))
    assert str(raised.value).count("config.json is") <= 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop(NAME), f"tensor {NAME} is in no safetensors file"),
        (lambda state: state.update(extra=torch.ones(3)), "tensor extra has no place in MiniInferSpeculativeHead"),
        (lambda state: state.update({NAME: state[NAME].to(torch.int8)}), f"tensor {NAME} is torch.int8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: Callable[[Any], Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        load(save(tmp_path, change))


def test_weights_that_are_cut_short_or_missing_are_named(tmp_path: Path) -> None:
    weights = save(tmp_path) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ModelError, match="it may be cut short"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match="no safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("guesser", ["demo-draft", "demo-head"])
def test_a_broken_model_is_told_before_what_guesses_for_it_takes_memory(
    guesser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DEMO_DIRECTORY, tmp_path / "model")
    state = load_file(tmp_path / "model" / WEIGHTS)
    save_file(state | {"model.norm.weight": torch.ones(7)}, tmp_path / "model" / WEIGHTS)

    def takes_memory(*_: Any, **__: Any) -> None:
        raise AssertionError("memory is taken")

    monkeypatch.setattr(DecoderModel, "take_memory", takes_memory)
    monkeypatch.setattr("mini_infer_engine.runtime.worker.load_head", takes_memory)
    method = {"speculative_method": "head"} if guesser == "demo-head" else {}
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape"):
        LLM(str(tmp_path / "model"), device="cpu", kv_cache_memory=2**24, speculative_model=guesser, **method)
