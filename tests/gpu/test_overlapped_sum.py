"""The kernel of sums that copy engines carry: one rank, whose peer's half stands there, or has not come."""

import time

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

import triton.language as tl

from mini_infer_engine.kernels.all_reduce import overlapped_sum
from mini_infer_engine.kernels.all_reduce.overlapped_sum import FLAG_BYTES, FLAGS, halves, launch_add_received
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, cases, error, normal
from tests.gpu.exact import exact_norm

pytestmark = KERNELS


class Rank:
    """A summand of its own, the peer's, flags that the peer writes, and the residual stream."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        self.summand, self.received = (normal(rows, width, dtype=dtype, seed=seed) for seed in (1, 2))
        self.flags = torch.zeros((FLAGS, FLAG_BYTES // 4), dtype=torch.int32, device=DEVICE)
        self.released = torch.zeros(1, dtype=torch.int32, pin_memory=ON_GPU)
        self.residual, self.weight = normal(rows, width, dtype=dtype, seed=8), normal(width, dtype=dtype, seed=9)
        self.out = torch.zeros_like(self.residual)

    def add(self, half: int, rows: slice, number: int) -> None:
        """Launch the kernel for these rows."""
        launch_add_received(
            self.summand[rows],
            self.received[rows],
            self.flags[half],
            number,
            self.released,
            residual=self.residual[rows],
            weight=self.weight,
            eps=1e-6,
            out=self.out[rows],
        )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("number", "flag"), [(1, 1), (7, 9), (2**31 - 1, -(2**31)), (2**31, -(2**31)), (2**32 - 1, -1), (2**32 - 1, 0)]
)
@pytest.mark.parametrize(("rows", "width"), cases([(3, 96)], [(1024, 3584), (4096, 4096)]))
def test_a_half_is_added_once_its_flag_has_come_to_the_number(
    rows: int, width: int, number: int, flag: int, dtype: torch.dtype
) -> None:
    """Or beyond it, which wraps around."""
    rank = Rank(2 * rows, width, dtype)
    before = rank.residual.clone()
    total = before.double() + rank.summand.double() + rank.received.double()
    rank.flags[1, 0] = flag
    second = slice(rows, None)
    rank.add(1, second, number)
    assert torch.equal(rank.residual[:rows], before[:rows])
    assert not rank.out[:rows].any()
    assert error(rank.residual[second], total[second]) <= 1
    assert error(rank.out[second], exact_norm(rank.residual[second], rank.weight, 1e-6)) <= (8 if dtype == FP32 else 1)
    assert rank.flags[1, 0] == flag
    assert rank.flags.count_nonzero() == (flag != 0)


def test_ranks_get_the_same_bits() -> None:
    one, other = Rank(4, 96, BF16), Rank(4, 96, BF16)
    other.summand, other.received = one.received, one.summand
    for rank in (one, other):
        rank.flags[0, 0] = 1
        rank.add(0, slice(0, None), 1)
    assert torch.equal(one.residual, other.residual)
    assert torch.equal(one.out, other.out)


@pytest.mark.parametrize(("number", "flag"), [(1, 0), (2**31, 2**31 - 1), (2**32 - 1, -2), (2**32, -1)])
def test_nobody_waits_any_more_once_released(number: int, flag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU while the kernel waits, by a write to main memory alone; those after it do not even look."""
    if not ON_GPU:  # whose turns take a microsecond
        monkeypatch.setattr(overlapped_sum, "TURNS", tl.constexpr(64))
    rank = Rank(2, 64, BF16)
    rank.flags[0, 0] = flag
    if not ON_GPU:
        rank.released.fill_(1)
    rank.add(0, slice(0, None), number)
    if ON_GPU:
        done = torch.cuda.Event()
        done.record()
        time.sleep(0.1)
        assert not done.query()
        rank.released.fill_(1)
        done.synchronize()
    assert rank.flags[0, 0] == (number + 2**30 + 2**31) % 2**32 - 2**31
    rank.released.fill_(0)
    rank.add(0, slice(0, None), number + 1)


@pytest.mark.parametrize("rows", [256, 2048, 2049, 4000, 8192, 8447])
def test_halves_end_between_tiles_and_the_first_is_the_larger(rows: int) -> None:
    first, second = halves(rows)
    assert (first.start, first.stop, second.stop) == (0, second.start, rows)
    assert first.stop % 128 == 0
    assert 0 <= first.stop - (rows - first.stop) <= 256
