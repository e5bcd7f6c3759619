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
    return load_head(folder, 16, 3, 100, torch.device("cpu"), dtype, dummy=False, seed=0)


def test_a_head_is_loaded_in_the_requested_dtype(tmp_path: Path) -> None:
    head, stored = load(save(tmp_path), torch.bfloat16), load_file(tmp_path / WEIGHTS)
    assert {name: tensor.dtype for name, tensor in head.state_dict().items()} == dict.fromkeys(stored, torch.bfloat16)
    assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message_part"),
    [
        ({"layers": [-1, 0]}, r"layers = \[-1, 0\]"),
        ({"layers": [2, 0]}, r"layers = \[2, 0\]"),
        ({"layers": [1, 1]}, r"layers = \[1, 1\]"),
        ({"layers": []}, r"layers = \[\]"),
        ({"layers": [0, 3]}, r"layers \[0, 3\].* 3"),
        ({"width": -8}, "width = -8"),
        ({"draft_vocab_size": 0}, "draft_vocab_size = 0"),
        ({"draft_vocab_size": 9}, "tensor d2t"),
        ({"width": 10**9}, r"fuse.weight.*\[8, 32\].*\[1000000000, 32\]"),
        ({"width": "wide"}, r"no config.json"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"config.json.*\['Qwen3ForCausalLM'\]"),
    ],
)
def test_a_head_is_refused_when_its_config_does_not_fit(
    changes: dict[str, Any], message_part: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message_part) as raised:
        load(save(tmp_path, **changes))
    assert str(raised.value).count("config.json is") <= 1


@pytest.mark.parametrize(
    ("change", "message_part"),
    [
        (lambda state: state.pop(NAME), f"tensor {NAME}"),
        (lambda state: state.update(extra=torch.ones(3)), "tensor extra .*MiniInferSpeculativeHead"),
        (lambda state: state.update({NAME: state[NAME].to(torch.int8)}), f"tensor {NAME} is torch.int8"),
    ],
)
def test_the_error_names_a_heads_tensor_when_it_does_not_fit(
    change: Callable[[Any], Any], message_part: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message_part):
        load(save(tmp_path, change))


def test_a_head_can_draft_from_a_part_of_the_vocabulary(tmp_path: Path) -> None:
    """Numbers are written as EAGLE-3's checkpoints have them: by how much the model's are higher."""
    d2t = torch.tensor([3, 3, 40, 96])
    head = load(save(tmp_path, lambda state: state.update(d2t=d2t), draft_vocab_size=4), torch.bfloat16)
    assert head.token_ids is not None
    assert head.token_ids.tolist() == [3, 4, 42, 99]
    assert head.fuse.weight.dtype == torch.bfloat16
    assert HeadShape.read(tmp_path / "config.json").to_config()["draft_vocab_size"] == 4
    assert "draft_vocab_size" not in SHAPE.to_config()


@pytest.mark.parametrize("d2t", [[0, 0, 0, 97], [0, -1, 0, 0], [-1, 0, 0, 0], [5, 3, 40, 90]])
def test_a_head_is_refused_when_its_d2t_is_invalid(d2t: list[int], tmp_path: Path) -> None:
    folder = save(tmp_path, lambda state: state.update(d2t=torch.tensor(d2t)), draft_vocab_size=4)
    with pytest.raises(ModelError, match="d2t must name 4"):
        load(folder)


def test_a_dummy_head_covers_the_whole_vocabulary(tmp_path: Path) -> None:
    folder = save(tmp_path, draft_vocab_size=5)
    head = load_head(folder, 16, 3, 100, torch.device("cpu"), torch.float32, dummy=True, seed=0)
    assert head.token_ids is not None
    assert head.token_ids.tolist() == [0, 20, 40, 60, 80]


def test_the_error_names_a_heads_weights_when_truncated_or_missing(tmp_path: Path) -> None:
    weights = save(tmp_path) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ModelError, match="cut short"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match="no safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("guesser", ["demo-draft", "demo-head"])
def test_a_broken_model_is_refused_before_the_draft_is_allocated(
    guesser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DEMO_DIRECTORY, tmp_path / "model")
    state = load_file(tmp_path / "model" / WEIGHTS)
    save_file(state | {"model.norm.weight": torch.ones(7)}, tmp_path / "model" / WEIGHTS)

    def allocates(*_: Any, **__: Any) -> None:
        raise AssertionError("memory is taken")

    monkeypatch.setattr(DecoderModel, "take_memory", allocates)
    monkeypatch.setattr("mini_infer_engine.runtime.worker.load_head", allocates)
    method = {"speculative_method": "head"} if guesser == "demo-head" else {}
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape"):
        LLM(str(tmp_path / "model"), device="cpu", kv_cache_memory=2**24, speculative_model=guesser, **method)
