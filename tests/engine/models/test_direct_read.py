"""Tensors are read in pieces into the memory that they fill, and a file that ends too soon is an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.models.weights import direct_read
from mini_infer_engine.models.weights.direct_read import FileTensor, read_directly
from mini_infer_engine.models.weights.loader import _stored_as_computed, open_checkpoint
from mini_infer_engine.runtime.worker import ModelWorker
from tests.support.tiny_models import DEEPSEEK, save_tiny_model

CPU = torch.device("cpu")


def written(folder: Path, sizes: list[int]) -> tuple[list[FileTensor], list[torch.Tensor]]:
    """Two files of tensors behind a header, the memory for them, and what it should have."""
    tensors, expected = [], []
    for name in ("a", "b"):
        begin, parts = 7, [bytes(7)]
        for size in sizes:
            values = torch.randn(size).to(torch.bfloat16)
            tensors.append(FileTensor(torch.zeros_like(values), folder / name, begin))
            parts.append(values.view(torch.uint8).numpy().tobytes())
            expected.append(values)
            begin += len(parts[-1])
        (folder / name).write_bytes(b"".join(parts))
    return tensors, expected


def test_all_bytes_are_read_when_tensors_are_larger_and_smaller_than_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_read, "_PIECE_BYTES", 64)
    tensors, expected = written(tmp_path, [1, 32, 33, 1000])
    counts: list[int] = []
    read_directly(tensors, CPU, counts.append)
    assert all(one.target.equal(values) for one, values in zip(tensors, expected, strict=True))
    assert sum(counts) == sum(2 * values.numel() for values in expected)
    assert max(counts) == 64


def test_nothing_is_read_when_there_are_no_tensors() -> None:
    read_directly([], CPU, lambda count: None)


def test_a_file_is_named_when_it_has_become_shorter(tmp_path: Path) -> None:
    tensors, _ = written(tmp_path, [100, 100])
    with (tmp_path / "b").open("r+b") as file:
        file.truncate(300)
    with pytest.raises(ModelError, match="/b is shorter"):
        read_directly(tensors, CPU, lambda count: None)


def test_a_file_is_named_when_it_is_gone(tmp_path: Path) -> None:
    tensors, _ = written(tmp_path, [100])
    (tmp_path / "b").unlink()
    with pytest.raises(ModelError, match="/b cannot be read"):
        read_directly(tensors, CPU, lambda count: None)


@pytest.mark.parametrize(
    ("architecture", "changes", "all_direct"),
    [("qwen3", {}, True), ("phi3", {}, True), ("gemma2", {"head_dim": 16}, True), ("deepseek_v2", DEEPSEEK, False)],
)
def test_weights_are_those_of_the_files_when_they_are_read_directly(
    architecture: str, changes: dict[str, Any], all_direct: bool, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, architecture, **changes)
    settings, config = EngineSettings(model=str(tmp_path), device="cpu"), read_config(tmp_path)
    loaded = ModelWorker.load(settings, config, tmp_path)
    expected = {name: parameter.clone() for name, parameter in loaded.model.named_parameters()}
    checkpoint, placements = open_checkpoint(tmp_path, config), loaded.model.checkpoint_tensors()
    direct = _stored_as_computed(placements, checkpoint)
    assert (direct.keys() == placements.keys()) is all_direct
    for tensor in direct.values():
        tensor.target.detach().zero_()
    read_directly(list(direct.values()), CPU, lambda count: None)
    for name, parameter in loaded.model.named_parameters():
        assert parameter.equal(expected[name]), name


def test_threads_may_write_when_the_caller_is_in_inference_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are torch's, as to a GPU: they refuse views of another mode than their own."""

    @contextmanager
    def copying(device: torch.device) -> Iterator[Callable[[direct_read._Piece], None]]:
        def read(piece: direct_read._Piece) -> None:
            buffer = torch.empty(piece.target.numel(), dtype=torch.uint8)
            direct_read._fill(piece, buffer)
            piece.target.copy_(buffer)

        yield read

    monkeypatch.setattr(direct_read, "_reader", copying)
    tensors, expected = written(tmp_path, [100, 100])
    with torch.inference_mode():
        read_directly(tensors, CPU, lambda count: None)
    assert all(one.target.equal(values) for one, values in zip(tensors, expected, strict=True))
