"""In fp32 the text of a request is the same whatever the engine does on the way, and the same as plain torch's."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.request import Request
from mini_infer_engine.runtime.cuda.executor import CudaExecutor
from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.tiny_models import save_tiny_model

pytestmark = GPU_ONLY
REQUESTS = 28
LONGEST_PROMPT = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    save_tiny_model(directory, "qwen3", head_dim=64)
    return directory


def requests(name: str = "") -> list[Request]:
    return mixed_requests(REQUESTS, 199, LONGEST_PROMPT, name)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Of plain torch on the same device, each request alone."""
    settings = make_settings(folder, attention_backend="torch", enable_prefix_caching=False, step_depth=0)
    runner = make_runner(settings)
    made = [texts(make_engine(settings, runner), [request])[0] for request in requests()]
    assert len({tuple(text) for text in made}) > REQUESTS // 2
    assert any(len(text) < request.sampling.max_tokens for text, request in zip(made, requests(), strict=True))  # type: ignore[operator]
    return made


def check(actual: list[list[int]], expected: list[list[int]]) -> None:
    different = [
        (index, requests()[index].sampling, place)
        for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True))
        if ours != theirs
        for place in [next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)]
    ]
    assert not different, f"(request, its sampling, first different token): {different}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"step_depth": 0},
        {"enforce_eager": True},
        {"enforce_eager": True, "step_depth": 0, "page_size": 64},
        {"long_prefill_token_threshold": 48},
        {"long_prefill_token_threshold": 33, "enforce_eager": True, "page_size": 16},
        {"max_num_batched_tokens": 64, "page_size": 256},
        {"enable_prefix_caching": False, "page_size": 16},
        {"max_num_seqs": 3, "page_size": 64},
        {"max_num_seqs": 1, "max_num_batched_tokens": 100},
        {"attention_backend": "torch", "page_size": 64},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()) or "defaults",
)
def test_settings_do_not_change_the_text(folder: Path, expected: list[list[int]], changes: dict[str, Any]) -> None:
    settings = make_settings(folder, **({"attention_backend": "triton"} | changes))
    runner = make_runner(settings)
    engine = make_engine(settings, runner)
    check(texts(engine, requests()), expected)
    cached = engine.stats().cached_prompt_tokens
    check(texts(engine, requests("warm")), expected)
    found = engine.stats().cached_prompt_tokens - cached
    reference = sum(len(request.prompt_token_ids) for request in requests())
    assert (found > reference * 0.8) == settings.enable_prefix_caching, "the second run is to find its prefixes"
    assert engine.scheduler.kv_cache.pool.usage == 0


def growing_requests() -> list[Request]:
    return mixed_requests(REQUESTS, 199, 30, outputs=(60, 120))


@pytest.fixture(scope="module")
def grown(folder: Path) -> list[list[int]]:
    """The text of short prompts, whose answers outgrow a small pool."""
    settings = make_settings(folder, attention_backend="torch")
    return texts(make_engine(settings, make_runner(settings)), growing_requests())


@pytest.mark.parametrize("changes", [{}, {"step_depth": 0}, {"enforce_eager": True}, {"enable_prefix_caching": False}])
def test_preemption_does_not_change_the_text(folder: Path, grown: list[list[int]], changes: dict[str, Any]) -> None:
    page_bytes = 3 * 2 * 16 * 2 * 64 * 4  # layers, keys and values, page size, kv heads, head_dim, fp32
    memory = {"page_size": 16, "kv_cache_memory": 38 * page_bytes}
    settings = make_settings(folder, attention_backend="triton", **memory, **changes)
    engine = make_engine(settings, make_runner(settings))
    assert texts(engine, growing_requests()) == grown
    assert engine.stats().preemptions > 0
    assert engine.scheduler.kv_cache.pool.usage == 0


def test_requests_that_come_and_go_at_any_step_keep_their_text(folder: Path, expected: list[list[int]]) -> None:
    """Arrivals spread over the steps: batches of every size, decodes beside prefills, slots used again."""
    settings = make_settings(folder, attention_backend="triton")
    engine = make_engine(settings, make_runner(settings))
    waiting = requests()
    made: dict[str, list[int]] = {request.request_id: [] for request in waiting}
    step = 0
    while waiting or engine.has_work:
        if waiting and step % 5 == 0:
            engine.add(waiting.pop(0))
        for output in engine.step() if engine.has_work else []:
            made[output.request_id] += output.token_ids
        step += 1
    check(list(made.values()), expected)


@pytest.mark.parametrize("chunk", [0, 48])
def test_large_models_have_prompts_and_decodes_in_one_graph(
    folder: Path, expected: list[list[int]], chunk: int
) -> None:
    settings = make_settings(
        folder,
        attention_backend="triton",
        long_prefill_token_threshold=chunk,
        disable=("separate_decode_graphs",),
    )
    runner = make_runner(settings)
    assert isinstance(runner.executor, CudaExecutor)
    assert all(graph.num_decodes for graph in runner.executor.graphs.prefill_graphs.values())
    check(texts(make_engine(settings, runner), requests()), expected)


def test_two_runners_in_one_process_do_not_disturb_each_other(folder: Path, expected: list[list[int]]) -> None:
    """Each has a workspace of its own, and graphs keep theirs."""
    all_settings = [make_settings(folder, attention_backend="triton", page_size=size) for size in (16, 128)]
    engines = [make_engine(settings, make_runner(settings)) for settings in all_settings]
    for engine in engines * 3:
        check(texts(engine, requests()), expected)
    torch.cuda.synchronize()


def test_gpu_memory_utilization_counts_this_engines_memory_only(folder: Path) -> None:
    """More than the share of the whole is in use already."""
    share = 0.03
    total = torch.cuda.get_device_properties(0).total_memory
    allocated = torch.empty(int(2 * share * total), dtype=torch.uint8, device="cuda")
    runner = make_runner(make_settings(folder, kv_cache_memory=None, gpu_memory_utilization=share))
    assert 0.1 * share * total < runner.pool.pages.nbytes <= share * total
    assert allocated.nbytes
