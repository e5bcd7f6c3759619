"""Sums that copy engines carry: the kernel of one rank, whose peer's half has come or not, and what it is told of both.

Streams are tried on two GPUs alone (tests/gpu2).
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

import triton.language as tl

from mini_infer_engine.communication.overlapped_sums import OverlappedSums
from mini_infer_engine.kernels.all_reduce import overlapped_sum
from mini_infer_engine.kernels.all_reduce.overlapped_sum import FLAG_BYTES, FLAGS, halves, launch_add_received
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, cases, error, normal, release_while_waiting
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
def test_waiting_kernels_end_when_they_are_released(number: int, flag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU while the kernel waits, by a write to main memory alone; those after it do not even look."""
    if not ON_GPU:  # whose turns take a microsecond
        monkeypatch.setattr(overlapped_sum, "TURNS", tl.constexpr(64))
    rank = Rank(2, 64, BF16)
    rank.flags[0, 0] = flag
    release_while_waiting(rank.released, lambda: rank.add(0, slice(0, None), number))
    assert rank.flags[0, 0] == (number + 2**30 + 2**31) % 2**32 - 2**31
    rank.released.fill_(0)
    rank.add(0, slice(0, None), number + 1)


def test_two_ranks_send_and_add_halves_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams that do everything at once: which flags and rows, and that nothing begins before all is added."""
    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: None, wait_event=lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())

    def write(flags: torch.Tensor, word: int, number: int) -> None:
        assert (flags.dtype, flags.shape) == (torch.uint32, (FLAGS * FLAG_BYTES // 4,))
        flags.view(torch.int32)[word] = number

    monkeypatch.setattr(torch.ops.symm_mem, "stream_write_value32_", write, raising=False)
    rows, width = 520, 32
    flags = [torch.zeros(FLAGS * FLAG_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    released = torch.zeros(1, dtype=torch.int32, pin_memory=ON_GPU)
    sums = [OverlappedSums(flags[rank], flags[1 - rank], released) for rank in range(2)]
    inboxes = [torch.full((rows, width), torch.nan, device=DEVICE) for _ in range(2)]
    weight = normal(width, seed=9)
    for turn in range(3):
        summands = [normal(rows, width, seed=10 * turn + rank) for rank in range(2)]
        residuals = [normal(rows, width, seed=10 * turn + 2) for _ in range(2)]
        outs = [torch.empty_like(residual) for residual in residuals]
        exact = residuals[0] + (summands[0] + summands[1])
        exchanges = [sums[rank].begin(inboxes[rank], inboxes[1 - rank]) for rank in range(2)]
        for half, part in enumerate(exchanges[0].halves):
            for rank, exchange in enumerate(exchanges):
                exchange.summand[part] = summands[rank][part]
                exchange.send(half)
        for half, part in enumerate(exchanges[0].halves):
            for rank, exchange in enumerate(exchanges):
                with pytest.raises(AssertionError, match="forgotten"):
                    sums[rank].check_added()
                exchange.add_norm(half, residuals[rank][part], weight, 1e-6, outs[rank][part])
        assert all(torch.equal(residual, exact) for residual in residuals)
        assert torch.equal(*outs)
        assert error(outs[0], exact_norm(exact, weight, 1e-6)) <= 8


@pytest.mark.parametrize("rows", [512, 513, 2048, 2049, 4000, 8192, 8447])
@pytest.mark.parametrize("width", [64, 3584, 4096, 8192])
def test_halves_end_between_tiles_and_both_have_many_rows(rows: int, width: int) -> None:
    first, second = halves(rows, width)
    assert (first.start, first.stop, second.stop) == (0, second.start, rows)
    assert first.stop % 256 == 0
    fewest = rows // 4 if rows >= 2048 else 1
    assert min(first.stop, rows - first.stop) >= fewest


def test_halves_are_cut_where_the_second_product_has_no_wave_of_few_tiles() -> None:
    """32 rows of 28 tiles on 132 SMs are 7 waves: so are 14 and 18, but two times 16 are 8."""
    assert halves(8192, 3584)[0].stop == 14 * 256
    assert halves(8192, 64)[0].stop == 16 * 256
    assert halves(2048, 3584)[0].stop == 4 * 256
