"""A runner that is ready before it has all graphs and kernels generates the same tokens as one that has them."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request
from mini_infer_engine.models.weights import direct_read
from mini_infer_engine.runtime.cuda.executor import CudaExecutor
from mini_infer_engine.runtime.model_runner import ModelRunner
from mini_infer_engine.weight_transfer.exchange import NO_EXCHANGE, WeightExchange
from tests.engine.weight_transfer.weight_engines import exchange, free_port
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.tiny_models import save_tiny_model

pytestmark = GPU_ONLY
VOCABULARY = 199


def load(
    folder: Path, *, defers: bool, weights: WeightExchange = NO_EXCHANGE, **options: Any
) -> tuple[Engine, ModelRunner]:
    settings = make_settings(folder, **options)
    runner = make_runner(settings, weights=weights, defers=defers)
    return make_engine(settings, runner), runner


def texts_while_warming_up(engine: Engine, runner: ModelRunner, requests: list[Request]) -> list[list[int]]:
    """The tokens of each request, with a part of the warm-up after each step."""
    step = engine.step

    def step_and_warm_up() -> Any:
        outputs = step()
        runner.warm_up()
        return outputs

    engine.step = step_and_warm_up  # type: ignore[method-assign]
    return texts(engine, requests)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"page_size": 16, "max_num_batched_tokens": 64}])
def test_tokens_are_the_same_when_graphs_are_captured_between_passes(tmp_path: Path, options: dict[str, Any]) -> None:
    save_tiny_model(tmp_path, "qwen3", head_dim=64)
    requests = mixed_requests(24, VOCABULARY, 200)
    engine, ready = load(tmp_path, defers=False, **options)
    expected = texts(engine, requests)
    engine, runner = load(tmp_path, defers=True, **options)
    assert isinstance(runner.executor, CudaExecutor)
    assert isinstance(ready.executor, CudaExecutor)
    if not options.get("enforce_eager"):
        assert 0 < len(runner.executor.graphs.decode_graphs) < len(ready.executor.graphs.decode_graphs)
    assert texts_while_warming_up(engine, runner, requests) == expected
    while runner.warm_up():
        pass
    assert set(runner.executor.graphs.decode_graphs) == set(ready.executor.graphs.decode_graphs)
    assert set(runner.executor.graphs.prefill_graphs) == set(ready.executor.graphs.prefill_graphs)
    assert texts(make_engine(make_settings(tmp_path, **options), runner), requests) == expected


@pytest.mark.parametrize(
    ("architecture", "piece_bytes", "peers"), [("qwen3", 1 << 24, False), ("llama", 1000, False), ("qwen3", 1000, True)]
)
def test_weights_are_those_of_the_files_when_kernels_are_loaded_meanwhile(
    architecture: str, piece_bytes: int, peers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that was to send them may be missing, too."""
    save_tiny_model(tmp_path, architecture, head_dim=64)
    ready = load(tmp_path, defers=False)[1]
    monkeypatch.setattr(direct_read, "_PIECE_BYTES", piece_bytes)
    weights = exchange(0, free_port()) if peers else NO_EXCHANGE
    runner = load(tmp_path, defers=True, weights=weights, weights_from="peers" if peers else "auto")[1]
    assert bool(runner.loaded.fallback) is peers
    for name, parameter in ready.worker.model.named_parameters():
        assert runner.worker.model.get_parameter(name).equal(parameter), name
    assert runner.loaded.source == "files"
    assert runner.loaded.num_bytes == ready.loaded.num_bytes
