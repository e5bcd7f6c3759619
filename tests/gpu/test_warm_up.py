"""A runner that is ready before it has all graphs and kernels generates the same tokens as one that has them."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.cuda.executor import CudaExecutor
from mini_infer_engine.runtime.model_runner import ModelRunner, make_runner
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_settings, mixed_requests, texts
from tests.support.tiny_models import save_tiny_model

pytestmark = GPU_ONLY
VOCABULARY = 199


def load(folder: Path, *, defers: bool, **options: Any) -> tuple[Engine, ModelRunner]:
    settings = make_settings(folder, **options)
    runner = make_runner(settings, read_config(folder), folder, CudaExecutor, defers=defers)
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
        assert 0 < len(runner.executor.decode_graphs) < len(ready.executor.decode_graphs)
    assert texts_while_warming_up(engine, runner, requests) == expected
    while runner.warm_up():
        pass
    assert set(runner.executor.decode_graphs) == set(ready.executor.decode_graphs)
    assert set(runner.executor.prefill_graphs) == set(ready.executor.prefill_graphs)
    assert texts(make_engine(make_settings(tmp_path, **options), runner), requests) == expected


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_weights_are_those_of_the_files_when_kernels_are_loaded_meanwhile(tmp_path: Path, kind: str) -> None:
    save_tiny_model(tmp_path, kind, head_dim=64)
    ready, runner = (load(tmp_path, defers=defers)[1] for defers in (False, True))
    for name, parameter in ready.worker.model.named_parameters():
        assert runner.worker.model.get_parameter(name).equal(parameter), name
    assert runner.loaded.source == "files"
    assert runner.loaded.num_bytes == ready.loaded.num_bytes
