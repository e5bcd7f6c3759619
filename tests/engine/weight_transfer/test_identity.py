"""Which files make equal weights."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.weight_transfer.identity import weights_identity
from tests.support.tiny_models import save_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen3")
    return folder


def identity(folder: Path, rank: int = 0, **options: object) -> str:
    settings = EngineSettings(model=str(folder), **options)  # type: ignore[arg-type]  # a test's table
    return weights_identity(settings, read_config(folder), folder, CPU, torch.float32, rank)


def test_an_identity_is_equal_when_files_are_named_by_their_hashes(model: Path, tmp_path: Path) -> None:
    """Two nodes have downloaded the same revision into a hub's cache."""
    copies = []
    for node in ("a", "b"):
        folder = tmp_path / node
        (folder / "blobs").mkdir(parents=True)
        shutil.copy(model / "config.json", folder / "config.json")
        content = (model / "model.safetensors").read_bytes()
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        os.utime(blob, (len(copies), len(copies)))
        (folder / "model.safetensors").symlink_to(blob)
        copies.append(folder)
    assert identity(copies[0]) == identity(copies[1])


def test_an_identity_is_another_when_a_file_was_written_again(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    before = identity(tmp_path / "copy")
    assert before == identity(tmp_path / "copy")
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    assert identity(tmp_path / "copy") != before


@pytest.mark.parametrize(
    "changes",
    [{"rank": 1}, {"quantization": "int8"}, {"tensor_parallel_size": 2}, {"revision": "main"}],
    ids=lambda changes: next(iter(changes)),
)
def test_an_identity_is_another_when_a_fact_differs(model: Path, changes: dict[str, object]) -> None:
    assert identity(model, **changes) != identity(model)  # type: ignore[arg-type]  # a test's table


def test_an_identity_is_equal_when_options_leave_the_tensors_as_they_are(model: Path) -> None:
    assert identity(model, max_num_seqs=3, seed=5) == identity(model)
