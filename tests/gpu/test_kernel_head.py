"""A speculative head by our kernels makes the states and hidden rows that it makes in plain torch."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.layers import linear
from mini_infer_engine.ops.triton_ops import TritonOps
from mini_infer_engine.runtime.cuda.kernel_head import KernelHead
from mini_infer_engine.speculation.head import HeadShape, SpeculativeHead
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, POLICY, WORKSPACE, cases, normal

pytestmark = KERNELS
TOLERANCE = {FP32: 1e-4, BF16: 4e-2}


@pytest.mark.parametrize(
    ("hidden", "width", "intermediate", "rows", "dtype"),
    cases(
        [(64, 32, 48, 1, FP32), (48, 64, 80, 5, FP32)],
        [
            (3584, 3584, 9472, 1, BF16),
            (1024, 512, 2048, 20, BF16),
            (256, 256, 768, 128, BF16),
            (256, 128, 512, 3, FP32),
        ],
    ),
)
def test_steps_of_a_head(
    hidden: int, width: int, intermediate: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "blocked_weight", lambda weight: None)
    torch.manual_seed(3)
    head = SpeculativeHead(HeadShape(hidden, width, intermediate, (0, 2, 5))).to(DEVICE, dtype).requires_grad_(False)
    kernels = KernelHead(head, TritonOps(KernelContext(POLICY, WORKSPACE)))
    features = normal(rows, 3 * hidden, dtype=dtype, seed=1) * 5
    with torch.inference_mode():
        expected, actual = head.begin(features), kernels.begin(features.clone())
        for step in range(3):
            embedding = normal(rows, hidden, dtype=dtype, seed=step)
            expected, reference = head.step(expected, embedding)
            actual, found = kernels.step(actual, embedding.clone())
            for one, other in ((actual.residual, expected), (found, reference)):
                assert float((one - other).float().norm() / other.float().norm()) < TOLERANCE[dtype] * (step + 1)
