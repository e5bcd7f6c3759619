"""Calibrated weights are made once, and are the same when they are read again."""

from pathlib import Path

import pytest
import torch

from mini_infer_engine.runtime import worker
from tests.support.tiny_models import PageDealer, run_chunks, save_tiny_model, tiny_runner

TOKENS = list(range(5, 40))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = torch.arange(4 * 32).view(4, 32) * 7 % 190 + 5
    monkeypatch.setattr(worker, "calibration_rows", lambda _: rows)
    return tmp_path / "cache" / "mini-infer" / "calibrated"


def logits(directory: Path, kind: str) -> torch.Tensor:
    runner = tiny_runner(directory, quantization=kind)
    return run_chunks(runner, TOKENS, PageDealer(runner).table(len(TOKENS)), [20, 15])


@pytest.mark.parametrize("kind", ["int4", "w8a8-int8"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "olmo2"])
def test_calibrated_weights_are_read_again_when_a_model_is_loaded_twice(
    kind: str, architecture: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path / "model", architecture)
    first = logits(tmp_path / "model", kind)
    [file] = cache.iterdir()
    assert kind in file.name
    monkeypatch.setattr(worker, "calibrate", None)  # nobody calibrates again
    assert torch.equal(logits(tmp_path / "model", kind), first)


@pytest.mark.parametrize("damage", [b"", b"no safetensors", b"cut"])
def test_weights_are_calibrated_again_when_the_kept_file_is_broken(
    damage: bytes, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path / "model", "qwen3")
    first = logits(tmp_path / "model", "int4")
    [file] = cache.iterdir()
    file.write_bytes(file.read_bytes()[:1000] if damage == b"cut" else damage)
    assert torch.equal(logits(tmp_path / "model", "int4"), first)
    assert "cannot be read" in caplog.text


def test_weights_are_calibrated_again_when_the_checkpoint_changes(cache: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "qwen3")
    logits(tmp_path / "model", "int4")
    save_tiny_model(tmp_path / "model", "qwen3", rms_norm_eps=1e-3)
    logits(tmp_path / "model", "int4")
    logits(tmp_path / "model", "w8a8-int8")
    assert len(list(cache.iterdir())) == 3


def test_weights_are_calibrated_when_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    save_tiny_model(tmp_path / "model", "qwen3")
    assert torch.isfinite(logits(tmp_path / "model", "int4")).all()
    assert "XDG_CACHE_HOME" in caplog.text


def test_a_warning_says_what_is_slow_when_weights_are_quantised_on_a_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path / "model", "qwen3")
    tiny_runner(tmp_path / "model")
    assert "on a CPU" not in caplog.text
    tiny_runner(tmp_path / "model", quantization="int8")
    assert "on a CPU int8 quantised weights save memory, but are slower" in caplog.text
