"""How many engines of which size are chosen, which limit decides, and what is said when nothing fits."""

from dataclasses import replace

import pytest

from mini_infer_engine.tools.sizing.fit import Fit, Load, NoFit, Targets, size
from mini_infer_engine.tools.sizing.gpu import GPUS
from tests.engine.tools.sizing.shapes import shape_of

SIZES = (1, 2, 4, 8)


def fit_of(
    model: str = "qwen2.5-7b",
    gpu: str = "h200",
    ttft_ms: float = 500,
    itl_ms: float = 20,
    rate: float = 1.0,
    prompt: int = 1024,
    output: int = 256,
    cached: int = 0,
    sizes: tuple[int, ...] = SIZES,
) -> Fit | NoFit:
    load = Load(requests_per_s=rate, prompt_tokens=prompt, output_tokens=output, cached_tokens=cached)
    targets = Targets(ttft_s=ttft_ms / 1e3, itl_s=itl_ms / 1e3)
    return size(shape_of(model, prompt + output), GPUS[gpu], load, targets, sizes)


def fitting(**different: object) -> Fit:
    found = fit_of(**different)  # type: ignore[arg-type]  # the same keywords, passed on
    assert isinstance(found, Fit), found
    return found


@pytest.mark.parametrize(
    ("different", "tensor", "bound"),
    [
        ({}, 1, "the time between tokens"),
        ({"itl_ms": 3.0}, 2, "the time between tokens"),
        ({"ttft_ms": 60}, 1, "the time to the first token"),
        ({"ttft_ms": 100, "itl_ms": 100, "prompt": 1500, "output": 16}, 1, "the time to the first token"),
        ({"ttft_ms": 60_000, "itl_ms": 1000}, 1, "the KV cache|a batch of 256"),
        (
            {"model": "qwen3-14b", "ttft_ms": 60_000, "itl_ms": 1000, "prompt": 100, "output": 8000, "rate": 0.1},
            1,
            "the KV cache",
        ),
        ({"ttft_ms": 1e7, "itl_ms": 1e7, "prompt": 4096, "output": 1}, 1, "a batch of 256"),
    ],
)
def test_the_smallest_engine_is_chosen_when_it_keeps_the_targets(
    different: dict[str, object], tensor: int, bound: str
) -> None:
    found = fitting(**different)
    assert (found.tensor, found.replicas) == (tensor, 1)
    assert any(name in found.bound for name in bound.split("|")), found.bound


@pytest.mark.parametrize("rate", [0.1, 1, 7, 30, 200])
@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen2.5-7b", "qwen3-14b"])
def test_each_engine_keeps_the_targets_when_the_load_is_shared_equally(model: str, rate: float) -> None:
    found = fitting(model=model, rate=rate, itl_ms=25)
    assert found.prediction.ttft_s <= 0.5
    assert found.prediction.itl_s <= 0.025
    assert found.prediction.kv_share <= 1
    assert found.replicas * found.engine_requests_per_s >= rate * 0.999
    if found.replicas > 1:
        assert (found.replicas - 1) * found.engine_requests_per_s < rate


def test_one_engine_serves_more_when_prompts_are_cached_or_targets_are_loose() -> None:
    plain = fitting().engine_requests_per_s
    assert fitting(cached=896).engine_requests_per_s > 1.2 * plain
    assert fitting(itl_ms=40).engine_requests_per_s > plain
    assert fitting(gpu="h100").engine_requests_per_s < plain


def test_more_gpus_share_an_engine_when_the_weights_do_not_fit_into_one() -> None:
    large = replace(shape_of("qwen3-14b"), num_layers=240)  # 162 GB of weights, and an H100 has 85
    load = Load(requests_per_s=1, prompt_tokens=1024, output_tokens=256)
    targets = Targets(ttft_s=60, itl_s=1)
    fit = size(large, GPUS["h100"], load, targets, SIZES)
    assert isinstance(fit, Fit)
    assert fit.tensor == 4
    refused = size(large, GPUS["h100"], load, targets, (1, 2))
    assert isinstance(refused, NoFit)
    assert all("weights leave no memory" in reason for reason in refused.reasons)
    assert "--max-tensor" in refused.remedy


def test_the_remedy_fits_when_targets_are_tighter_than_an_idle_engine() -> None:
    refused = fit_of(ttft_ms=5, itl_ms=0.5)
    assert isinstance(refused, NoFit)
    assert len(refused.reasons) == 3, "28 heads are shared by 1, 2 and 4"
    assert all("idle engine" in reason for reason in refused.reasons)
    words = refused.remedy.replace(",", "").split()
    ttft_ms, itl_ms = (float(words[words.index(flag) + 1]) for flag in ("--ttft", "--itl"))
    assert isinstance(fit_of(ttft_ms=ttft_ms, itl_ms=itl_ms), Fit)


def test_the_context_is_named_when_requests_are_longer_than_the_model_allows() -> None:
    refused = fit_of(prompt=32_000, output=1000)
    assert isinstance(refused, NoFit)
    assert "32,768" in refused.reasons[0]
