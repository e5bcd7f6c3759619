"""A sum between ranks that is pending: nobody sees the residual stream, or its norm, without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.moe import MoESpec, SparseMoE
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.ops.base import PendingSum, ResidualState
from mini_infer_engine.ops.torch_ops import TorchOps

ROWS, WIDTH = 7, 16
PARTS = (slice(0, 4), slice(4, 7))


class Coming:
    """What two parts of a sum add to a residual stream, and in which order they have."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.residual, self.total = (torch.randn((ROWS, WIDTH), generator=generator) for _ in range(2))
        self.exact = self.residual + self.total
        self.normed = torch.full_like(self.residual, torch.nan)
        self.added: list[int] = []

    def add(self, part: int) -> Callable[[], None]:
        """What adds one part."""

        def add() -> None:
            self.added.append(part)
            rows = PARTS[part]
            self.residual[rows] += self.total[rows]
            self.normed[rows] = NORM(self.residual[rows])

        return add

    @property
    def state(self) -> ResidualState:
        """Before anything is added."""
        return ResidualState(
            self.residual, PendingSum(self.normed, [(rows, self.add(n)) for n, rows in enumerate(PARTS)])
        )


def filled(module: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / WIDTH**0.5
    return module


NORM = filled(RMSNorm(WIDTH, 1e-6), 1)
LINEAR, BOTH = filled(Linear(WIDTH, WIDTH, bias=True), 2), filled(Linear(WIDTH, 2 * WIDTH), 3)
MOE = filled(SparseMoE(MoESpec(WIDTH, 8, 4, 2, True)), 4)
X = torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(5))
PICKED = torch.tensor([6, 0])
OPS = TorchOps()

READS: dict[str, Callable[[ResidualState], Any]] = {
    "residual": lambda state: state.residual,
    "normed": lambda state: (state.normed, state.residual)[1],
    "select": lambda state: state.select(PICKED).residual,
    "norm_linear": lambda state: OPS.norm_linear(state, NORM, LINEAR),
    "norm_gated_linear": lambda state: OPS.norm_gated_linear(state, NORM, BOTH, "silu"),
    "linear_add_norm": lambda state: OPS.linear_add_norm(X, LINEAR, state, NORM).residual,
    "linear_norm_add_norm": lambda state: OPS.linear_norm_add_norm(X, LINEAR, NORM, state, NORM).residual,
    "moe_add_norm": lambda state: OPS.moe_add_norm(state, NORM, MOE, NORM).residual,
    "norm": lambda state: OPS.norm(state, NORM),
    "no norm": lambda state: OPS.norm(state, None),
    "logits": lambda state: OPS.logits(state, NORM, LINEAR),
    "add_norm": lambda state: OPS.add_norm(X, state, NORM).residual,
}


@pytest.mark.parametrize("verb", READS)
def test_the_sum_is_added_when_the_residual_is_read(verb: str) -> None:
    coming = Coming()
    found = READS[verb](coming.state)
    assert torch.equal(found, READS[verb](ResidualState(coming.exact.clone())))
    assert coming.added == [0, 1]


def test_parts_are_added_in_order_when_they_are_requested() -> None:
    coming = Coming()
    state = coming.state
    pending = state.pending
    assert pending is not None
    for number, (rows, normed) in enumerate(pending.parts()):
        assert coming.added == list(range(number + 1))
        assert rows == PARTS[number]
        assert torch.equal(normed, NORM(coming.exact[rows]))
    assert pending.num_rows == ROWS
    assert state.pending is None, "nothing of it is left"
    assert state.normed is coming.normed
    assert torch.equal(state.residual, coming.exact)
    assert coming.added == [0, 1]


def test_residual_state_adds_each_pending_part_once() -> None:
    coming = Coming()
    state = coming.state
    assert state.pending is not None
    parts = state.pending.parts()
    next(parts)
    assert torch.equal(state.residual, coming.exact)
    rows, normed = next(parts)
    assert torch.equal(normed, NORM(coming.exact[rows]))
    assert next(parts, None) is None
    assert coming.added == [0, 1]


def test_residual_state_is_unchanged_when_nothing_is_pending() -> None:
    residual, normed = torch.zeros((2, 3)), torch.ones((2, 3))
    for value in (None, normed):
        state = ResidualState(residual, value)
        assert state.pending is None
        assert state.residual is residual
        assert state.normed is value
