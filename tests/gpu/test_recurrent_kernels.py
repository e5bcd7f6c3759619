"""Kernels of layers with a recurrent state, against the rules in torch: outputs, and every slot that is written."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import Row
from mini_infer_engine.models.state_spec import StateSpec
from mini_infer_engine.ops.recurrence.gated_delta_rule import GATED_DELTA_RULE
from mini_infer_engine.ops.recurrence.rule import LinearRule
from mini_infer_engine.ops.recurrence.state_space import STATE_SPACE_RULE
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.memory.state_slots import StateSlots
from mini_infer_engine.runtime.recurrent.torch_pass import TorchRecurrentPass
from mini_infer_engine.runtime.recurrent.triton_pass import TritonRecurrentPass
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, cases, error, normal

pytestmark = KERNELS
ROWS = [
    Row(0, 40, 1, None, [], None),
    Row(1, 0, 1, [3], [], None, checkpoints=[(1, 2)]),
    Row(2, 16, 1, [3], [], None, state_source=0),
    Row(3, 0, 70, [3] * 70, [], None, checkpoints=[(2, 3), (64, 4)]),
    Row(4, 32, 33, [3] * 33, [], None, state_source=1, checkpoints=[(33, 5)]),
    Row(5, 7, 2, [3] * 2, [], None),
]
"""Rows that begin, go on and resume, of one token and of more, with checkpoints inside and at the end."""
SMALL: dict[str, tuple[LinearRule, int, int, int, int]] = {
    "gated delta": (GATED_DELTA_RULE, 2, 4, 24, 40),
    "state space": (STATE_SPACE_RULE, 1, 3, 12, 16),
}
"""The rule, key heads, heads, key_dim and value_dim."""
LARGE: dict[str, tuple[LinearRule, int, int, int, int]] = {
    "gated delta, Qwen3-Next": (GATED_DELTA_RULE, 16, 32, 128, 128),
    "state space, Granite 4": (STATE_SPACE_RULE, 1, 128, 128, 64),
}


class NoAttention:
    """The attention of a pass that has none."""

    logits_indices = positions = None


class Layer:
    """The part of a recurrent block that a pass reads, the second of three."""

    layer = 1

    def __init__(self, channels: int, width: int, dtype: torch.dtype, *, bias: bool) -> None:
        self.conv1d = torch.nn.Conv1d(channels, channels, width, groups=channels, bias=bias, device=DEVICE, dtype=dtype)
        self.conv1d.requires_grad_(requires_grad=False)


def pools(channels: int, width: int, state_shape: tuple[int, ...], dtype: torch.dtype) -> list[StatePool]:
    """Two pools with the same random states."""
    spec = StateSpec(3, channels, width, state_shape, dtype)
    made = [StatePool(spec, StateSlots(spec.slot_bytes, 6, 6), DEVICE) for _ in range(2)]
    for pool in made:
        for seed, tensor in enumerate(pool.tensors):
            tensor.copy_(normal(*tensor.shape, dtype=tensor.dtype, seed=seed))
    return made


def passes(made: list[StatePool], rows: list[Row]) -> tuple[Any, Any]:
    """A pass in torch over the first pool, and one by kernels over the second."""
    attention: Any = NoAttention()
    return (
        TorchRecurrentPass(attention, made[0], rows, DEVICE),
        TritonRecurrentPass(attention, made[1], rows, DEVICE),
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("channels", "width"), cases([(70, 2), (300, 4)], [(8192, 4), (64, 9)]))
def test_convolutions_equal_torch_when_rows_begin_go_on_and_resume(
    channels: int, width: int, dtype: torch.dtype
) -> None:
    made = pools(channels, width - 1, (0,), dtype)
    layer = Layer(channels, width, dtype, bias=width != 4)
    x = normal(sum(row.count for row in ROWS), channels + 32, dtype=dtype)[:, :channels]  # rows of x are strided
    expected, actual = (one.convolve(x, layer) for one in passes(made, ROWS))
    assert error(actual, expected) <= 2.0
    assert torch.equal(made[0].convolutions, made[1].convolutions)


def inputs(rule: LinearRule, tokens: int, key_heads: int, heads: int, key_dim: int, value_dim: int) -> list[Tensor]:
    q, k = (normal(tokens, key_heads, key_dim, seed=seed) * key_dim**-0.5 for seed in (1, 2))
    v, log_decay = normal(tokens, heads, value_dim), -normal(tokens, heads).abs() * 0.2
    return [q, k, v, log_decay] + ([normal(tokens, heads).sigmoid()] if rule is GATED_DELTA_RULE else [])


@pytest.mark.parametrize("rows", [ROWS[:3], ROWS, ROWS[3:4]], ids=["steps", "mixed", "scan"])
@pytest.mark.parametrize("kind", cases(SMALL, LARGE))
def test_recurrences_equal_torch_when_rows_begin_go_on_and_resume(kind: str, rows: list[Row]) -> None:
    rule, *sizes = (SMALL | LARGE)[kind]
    made = pools(8, 3, (sizes[1], sizes[2], sizes[3]), FP32)
    given = inputs(rule, sum(row.count for row in rows), *sizes)
    layer = Layer(8, 4, FP32, bias=False)
    expected, actual = (one.scan(rule, tuple(given), layer) for one in passes(made, rows))
    assert error(actual, expected) <= 100.0
    assert error(made[1].states, made[0].states) <= 100.0
