"""Weights that a thread loads are waited for, and its faults are those of whoever waits."""

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.layers import linear
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime import worker
from mini_infer_engine.runtime.weight_loading import WeightLoading
from mini_infer_engine.runtime.worker import ModelWorker
from mini_infer_engine.weight_transfer.exchange import LoadedWeights
from tests.support.tiny_models import DEEPSEEK, save_tiny_model

PEER = LoadedWeights(source="peer", peer="other")


def test_weights_are_there_at_once_when_they_were_loaded_before() -> None:
    assert WeightLoading(PEER).wait() is PEER


def test_the_caller_goes_on_when_a_thread_loads() -> None:
    begun = Event()

    def load() -> LoadedWeights:
        assert begun.wait(10)
        return PEER

    loading = WeightLoading.begin(load)
    begun.set()
    assert loading.wait() is PEER
    assert loading.wait() is PEER


def test_a_fault_of_the_files_reaches_the_caller_when_it_waits() -> None:
    def load() -> LoadedWeights:
        raise ModelError("model.safetensors: truncated")

    with pytest.raises(ModelError, match="truncated"):
        WeightLoading.begin(load).wait()


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("architecture", "settings", "device", "dtype", "expected"),
    [
        ("qwen3", {}, CUDA, torch.float32, True),
        ("llama", {}, CUDA, torch.float32, True),
        ("deepseek_v2", {}, CUDA, torch.float32, True),
        ("qwen3", {}, CPU, torch.float32, False),
        ("qwen3", {}, CUDA, torch.bfloat16, False),
        ("gemma2", {}, CUDA, torch.float32, False),
        ("qwen3", {"quantization": "int8"}, CUDA, torch.float32, False),
        ("qwen3", {"speculative_method": "ngram", "num_speculative_tokens": 2}, CUDA, torch.float32, False),
    ],
    ids=["norms of keys", "plain", "latent", "a CPU", "converted", "norms with an offset", "rounded", "guesses"],
)
def test_passes_run_before_weights_when_nothing_changes_their_form(
    architecture: str,
    settings: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    expected: bool,
    tmp_path: Path,
) -> None:
    save_tiny_model(tmp_path, architecture, **(DEEPSEEK if architecture == "deepseek_v2" else {}))
    options = EngineSettings(model=str(tmp_path), **settings)
    model, checkpoint = worker._open_model(options, read_config(tmp_path), tmp_path, dtype)
    assert checkpoint is not None
    assert worker._computes_before_weights(options, model, checkpoint, device) is expected


def test_a_worker_has_its_memory_before_its_weights_when_they_are_deferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "qwen3", num_hidden_layers=1)
    settings, config = EngineSettings(model=str(tmp_path), device="cpu"), read_config(tmp_path)
    expected = ModelWorker.load(settings, config, tmp_path)
    begun, load_weights = Event(), worker.load_weights

    def load(*arguments: Any) -> None:
        assert begun.wait(30)
        load_weights(*arguments)

    monkeypatch.setattr(worker, "_computes_before_weights", lambda *_: True)
    monkeypatch.setattr(worker, "load_weights", load)
    monkeypatch.setattr(linear, "blocked_weight", lambda weight: None)  # a CPU's layers give theirs up
    for name in ("synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    made = ModelWorker.load(settings, config, tmp_path, defers=True)
    assert not any(parameter.any() for parameter in made.model.parameters())
    made.finish_loading(64)
    begun.set()
    assert made.loaded.num_bytes == expected.loaded.num_bytes
    for name, parameter in expected.model.named_parameters():
        assert made.model.get_parameter(name).equal(parameter), name
