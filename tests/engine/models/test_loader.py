"""Weights from disk: all of them, each in its place, or an error that says which one."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.parallelism.tensor_parallel import Shard, TensorParallel
from mini_infer_engine.layers.placement import Part, Placement
from mini_infer_engine.model_path import DEMO_DIRECTORY, resolve_model
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.models.registry import class_of, read_config
from mini_infer_engine.models.transformers_backend.names import GatheredPlacement
from mini_infer_engine.models.weights import loader
from mini_infer_engine.models.weights.checkpoint import StoredTensor
from mini_infer_engine.models.weights.direct_read import read_directly
from mini_infer_engine.models.weights.loader import load_weights, open_checkpoint
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model, tiny_runner

TOKENS = list(range(5, 40))


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_sharded_checkpoints_are_loaded_by_their_index(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen2", shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    runner = tiny_runner(tmp_path)
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(35), [35])
    assert (actual - reference_logits(model, TOKENS)).abs().max() <= 1e-4
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        tiny_runner(tmp_path)


def test_the_error_names_the_index_when_it_is_wrong(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    name = next(name for name, file in content["weight_map"].items() if file == shards[0])
    content["weight_map"][name] = shards[1]
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=f"{shards[1]}: tensor {name}"):
        tiny_runner(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json cannot be read"):
        tiny_runner(tmp_path)


def test_the_error_names_a_tensor_when_it_is_missing_or_unused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        tiny_runner(tmp_path)
    save_tiny_model(tmp_path, "qwen3")
    edit(tmp_path, lambda tensors: tensors.update({"model.extra": torch.ones(1)}))
    with pytest.raises(ModelError, match=r"model\.safetensors.*model\.extra.*Qwen3ForCausalLM"):
        tiny_runner(tmp_path)


def test_the_error_names_tensor_file_and_both_shapes_when_a_shape_is_wrong(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(7, 64)}))
    with pytest.raises(ModelError, match=r"model\.safetensors.*k_proj\.weight.*\[7, 64\].*\[48, 64\]"):
        tiny_runner(tmp_path)


NAME = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(NAME), f"tensor {NAME} is in no"),
        (lambda tensors: tensors.update({"model.extra": torch.ones(1)}), "model.extra has no place"),
        (lambda tensors: tensors.update({NAME: torch.ones(7, 64)}), f"tensor {NAME} has shape [7, 64]"),
        (lambda tensors: tensors.update({NAME: torch.ones(48, 64, dtype=torch.int8)}), f"tensor {NAME} is torch.int8"),
        (
            lambda tensors: tensors.update({NAME: torch.ones(48, 64).to(torch.float8_e4m3fn)}),
            f"tensor {NAME} is torch.float8",
        ),
    ],
)
def test_loading_fails_before_allocation_when_tensors_do_not_fit(
    change: Callable[[dict[str, torch.Tensor]], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "qwen3")
    edit(tmp_path, change)
    monkeypatch.setattr(DecoderModel, "take_memory", None)  # nobody gets as far as that
    with pytest.raises(ModelError, match=re.escape(words)):
        tiny_runner(tmp_path)


def test_loading_a_model_does_not_import_symbolic_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "qwen3")
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)  # nor sympy: a second to import
    assert tiny_runner(tmp_path).num_pages > 0


def test_tensors_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    extra = {"lm_head.weight": table.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}
    edit(tmp_path, lambda tensors: tensors.update(extra))
    assert tiny_runner(tmp_path).worker.model.lm_head is None


def test_the_error_names_the_file_when_weights_are_missing_or_broken(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        tiny_runner(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match="has no safetensors file"):
        tiny_runner(tmp_path)


def test_dummy_weights_need_no_file_and_repeat_by_seed(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    first, again, other = (tiny_runner(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    logits = [run_chunks(runner, TOKENS, PageDealer(runner).table(35), [35]) for runner in (first, again, other)]
    assert torch.isfinite(logits[0]).all()
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])


def test_resolve_model_finds_a_model_or_raises_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("demo") == DEMO_DIRECTORY
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(str(tmp_path / "absent"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "file"))
    with pytest.raises(ModelError, match="hub id"):
        resolve_model("no good id")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"someone/some-model.*hub"):
        resolve_model("someone/some-model")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_bytes_are_where_the_loader_says_when_tensors_are_read_straight_from_files(
    kind: str, rank: int, tmp_path: Path
) -> None:
    """The rows of one of two ranks are, too; columns are elsewhere, and are read as before."""
    save_tiny_model(tmp_path, kind)
    config = replace(read_config(tmp_path), tensor_parallel=TensorParallel(rank, 2))
    checkpoint = open_checkpoint(tmp_path, config)
    expected, read = (class_of(config)(config).to(torch.float32) for _ in range(2))
    load_weights(expected, checkpoint)
    with torch.no_grad():
        for parameter in read.parameters():
            parameter.zero_()
    tensors = loader._stored_as_computed(read.checkpoint_tensors(), checkpoint)
    placements = expected.checkpoint_tensors()
    read_directly(list(tensors.values()), torch.device("cpu"), lambda count: None)
    for name, tensor in tensors.items():
        assert tensor.target.equal(placements[name].target), name
    left = set(placements) - set(tensors)
    assert left
    assert all(name.endswith(("o_proj.weight", "down_proj.weight")) for name in left), left


def test_tensors_that_are_converted_are_not_read_straight_from_files() -> None:
    """Their shape may be that of what is made of them."""
    stored = StoredTensor(Path("file"), (4, 4), torch.float32, begin=8)
    target = torch.zeros(4, 4)
    assert loader._begin_in_file(stored, Placement(target)) == 8
    assert loader._begin_in_file(stored, Placement(target, expand=torch.t)) is None
    assert loader._begin_in_file(stored, GatheredPlacement(target)) is None
    assert loader._begin_in_file(replace(stored, dtype=torch.float16), Placement(target)) is None
    assert loader._begin_in_file(stored, Placement(target.t()[:, :2])) is None
    assert loader._begin_in_file(stored, Placement(target[2:], part=Part(0, Shard(4, ((2, 4),))))) == 8 + 2 * 4 * 4
    assert loader._begin_in_file(stored, Placement(target[2:], part=Part(0, Shard(4, ((0, 1), (3, 4)))))) is None
    assert (
        loader._begin_in_file(stored, Placement(target[:, :2].contiguous(), part=Part(1, Shard(4, ((0, 2),))))) is None
    )
