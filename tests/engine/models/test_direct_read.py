"""Tensors are read in pieces into the memory that they fill, and a file that ends too soon is an error."""

from pathlib import Path

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.models.weights import direct_read
from mini_infer_engine.models.weights.direct_read import FileTensor, read_directly

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
