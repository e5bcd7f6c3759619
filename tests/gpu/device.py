"""Where kernel tests run: an NVIDIA GPU, or a CPU under Triton's interpreter, which takes their small cases only."""

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from mini_infer_engine.kernels.policy import kernel_policy
from mini_infer_engine.kernels.workspace import Workspace

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not ON_GPU
DEVICE = torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")
WORKSPACE = Workspace(DEVICE)
"""Of all kernels that a test calls by itself: they run one after another, as a runner's do."""
POLICY = kernel_policy(DEVICE)
FP32, BF16 = torch.float32, torch.bfloat16

GPU_ONLY = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")]
KERNELS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs an NVIDIA GPU (small cases: TRITON_INTERPRET=1)"),
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:.*determinis"),  # what fills fresh memory also warns of other things
]


def cases(small: Iterable[Any], large: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the small ones anywhere, the large ones on a GPU. The interpreter has no bf16 products."""
    too_slow = pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter: needs an NVIDIA GPU")
    marked = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=too_slow) for case in large]
    return [*small, *marked]


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> torch.Tensor:
    """Standard normal values, the same on every machine."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference in units of the dtype's epsilon at the largest exact value. NaN and infinity count as inf."""
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    if not exact.numel():
        return 0.0
    if not actual.isfinite().all():
        return float("inf")
    difference = (actual.double() - exact.double()).abs().max() / exact.double().abs().max()
    return float(difference) / torch.finfo(actual.dtype).eps


def release_while_waiting(released: torch.Tensor, launch: Callable[[], object]) -> None:
    """Kernels that wait in vain end by a write to main memory alone; under the interpreter it comes first."""
    if not ON_GPU:
        released.fill_(1)
    launch()
    if ON_GPU:
        done = torch.cuda.Event()
        done.record()
        time.sleep(0.1)
        assert not done.query()
        released.fill_(1)
        done.synchronize()
