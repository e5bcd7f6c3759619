"""Ranks of a group get the tensors of the same ranks of another group, or all read files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.runtime.model_runner import ModelRunner
from mini_infer_engine.weight_transfer import client
from mini_infer_engine.weight_transfer.model_tensors import ModelTensors
from tests.engine.weight_transfer.weight_engines import exchange, free_port
from tests.support.thread_group import ThreadGroup
from tests.support.tiny_models import save_tiny_model


def test_each_rank_has_its_part_when_a_group_loads_from_another(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    with _serving(tmp_path, quantization="int8") as (source, port):
        copy = ThreadGroup(tmp_path, 2, weights=exchange(0, port), weights_from="peers", quantization="int8")
        assert [runner.loaded.source for runner in copy.runners] == ["peer", "peer"]
        for ours, theirs in zip(source.runners, copy.runners, strict=True):
            assert _bytes(ours) == _bytes(theirs)
        assert _bytes(source.runners[0]) != _bytes(source.runners[1])


def test_all_ranks_read_files_when_one_finds_no_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HELLO_S", 0.5)
    save_tiny_model(tmp_path, "qwen3")
    with _serving(tmp_path) as (source, port):
        assert source.runners[1].weight_server is not None
        source.runners[1].weight_server.close()
        copy = ThreadGroup(tmp_path, 2, weights=exchange(0, port), weights_from="peers")
        assert [runner.loaded.source for runner in copy.runners] == ["files", "files"]
        assert copy.runners[0].loaded.fallback == "another rank reads files"
        for ours, theirs in zip(source.runners, copy.runners, strict=True):
            assert _bytes(ours) == _bytes(theirs)


@contextmanager
def _serving(folder: Path, **settings: Any) -> Iterator[tuple[ThreadGroup, int]]:
    port = free_port(4)
    group = ThreadGroup(folder, 2, weights=exchange(port), **settings)
    try:
        yield group, port
    finally:
        for runner in group.runners:
            if runner.weight_server is not None:
                runner.weight_server.close()


def _bytes(runner: ModelRunner) -> list[bytes]:
    """The contents of all tensors that have no rows of padding, which are not initialised."""
    tensors = ModelTensors(runner.worker.model)
    names = {spec.name: index for index, spec in enumerate(tensors.specs)}
    found = [name for name in names if not name.startswith(("lm_head", "model.embed_tokens"))]
    return [tensors.flat(names[name]).numpy().tobytes() for name in found]
