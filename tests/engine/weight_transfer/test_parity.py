"""An engine that has loaded a peer's weights computes what one that has read the files computes, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.weight_transfer.model_tensors import ModelTensors
from tests.engine.weight_transfer.weight_engines import exchange, free_port, load, logits_of, serving
from tests.support.tiny_models import DEEPSEEK, save_tiny_model, save_tiny_model_with_text


@pytest.mark.parametrize(
    ("architecture", "changes", "settings"),
    [
        ("qwen3", {}, {}),
        ("qwen3", {"tie_word_embeddings": True}, {}),
        ("gemma2", {}, {}),
        ("deepseek_v2", DEEPSEEK, {}),
        ("qwen2", {}, {"dtype": "bfloat16"}),
        ("qwen2", {}, {"quantization": "int8", "quantize_lm_head": True}),
        ("qwen3", {"tie_word_embeddings": True}, {"quantization": "fp8"}),
        (
            "qwen3",
            {"tie_word_embeddings": True},
            {"quantization": "int8", "quantize_lm_head": True, "quantize_embeddings": True},
        ),
        ("qwen3_moe", {}, {"quantization": "int4"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items())[:40],
)
def test_logits_are_equal_when_weights_come_from_a_peer(
    tmp_path: Path, architecture: str, changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    save_tiny_model(tmp_path, architecture, **changes)
    with serving(tmp_path, **settings) as (source, port):
        copy = load(tmp_path, exchange(0, port), **settings)
        assert copy.loaded.source == "peer", copy.loaded
        assert copy.loaded.num_bytes > 0
        assert_same_tensors(source, copy)
        assert torch.equal(logits_of(source), logits_of(copy))


def test_tensors_are_equal_when_a_model_of_transformers_comes_from_a_peer(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    with serving(tmp_path, model_impl="transformers") as (source, port):
        copy = load(tmp_path, exchange(0, port), model_impl="transformers")
        assert copy.loaded.source == "peer", copy.loaded
        assert_same_tensors(source, copy)


@pytest.mark.parametrize("kind", ["int4", "w8a8-int8"])
def test_nothing_is_calibrated_when_weights_come_from_a_peer(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny_model_with_text(tmp_path / "model", "qwen3")
    with serving(tmp_path / "model", quantization=kind) as (source, port):
        monkeypatch.setattr("mini_infer_engine.runtime.worker.calibrate", None)
        monkeypatch.setattr("mini_infer_engine.runtime.worker.restore", None)
        copy = load(tmp_path / "model", exchange(0, port), quantization=kind)
        assert copy.loaded.source == "peer", copy.loaded
        assert torch.equal(logits_of(source), logits_of(copy))


def test_weights_pass_through_engines_when_each_loads_those_of_the_one_before(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    with serving(tmp_path) as (source, port):
        middle_port = free_port()
        middle = load(tmp_path, exchange(middle_port, port))
        assert middle.weight_server is not None
        try:
            last = load(tmp_path, exchange(0, middle_port))
        finally:
            middle.weight_server.close()
        assert last.loaded.peer.endswith(str(middle_port))
        assert torch.equal(logits_of(source), logits_of(last))


def assert_same_tensors(source: Any, copy: Any) -> None:
    ours, theirs = ModelTensors(source.worker.model), ModelTensors(copy.worker.model)
    assert ours.specs == theirs.specs
    for index, spec in enumerate(ours.specs):
        assert torch.equal(ours.flat(index), theirs.flat(index)), spec.name
