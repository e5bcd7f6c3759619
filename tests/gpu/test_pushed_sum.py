"""All-reduce by writing into peers' memory: one rank, whose peers are on the same device and have written."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

import triton.language as tl

from mini_infer_engine.kernels.all_reduce import pushed_sum
from mini_infer_engine.kernels.all_reduce.pushed_sum import (
    MARK,
    MAX_ROW_BYTES,
    MAX_ROWS,
    Inbox,
    inbox_bytes,
    launch_pushed_sum,
)
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, cases, error, normal
from tests.gpu.exact import exact_norm

pytestmark = KERNELS
SLOTS = 3


class Peers:
    """Memory of `world` ranks, of which `rank` runs: room for a summand, then an inbox."""

    def __init__(self, world: int, rank: int, rows: int, width: int, dtype: torch.dtype) -> None:
        self.world, self.rank = world, rank
        self.shape, self.dtype = (rows, width), dtype
        begin = -(-rows * width * dtype.itemsize // 16) * 16
        self.memory = [
            torch.full((begin + inbox_bytes(world),), 0, dtype=torch.uint8, device=DEVICE) for _ in range(world)
        ]
        for memory in self.memory:
            memory[begin:].view(torch.int32).fill_(MARK)
        pointers = torch.tensor([memory.data_ptr() for memory in self.memory], device=DEVICE)
        self.released = torch.zeros(1, dtype=torch.int32, pin_memory=ON_GPU)
        self.inbox = Inbox(pointers, begin, torch.zeros(MAX_ROWS, dtype=torch.int32, device=DEVICE), self.released)

    def place(self, owner: int, slot: int, writer: int) -> torch.Tensor:
        """Where one rank's summand comes to stand in another's memory, as raw bits of the dtype's size."""
        bits = torch.int16 if self.dtype.itemsize == 2 else torch.int32
        places = self.memory[owner][self.inbox.begin :].view(bits).view(SLOTS, self.world, MAX_ROWS, -1)
        return places[slot, writer, : self.shape[0], : self.shape[1]]

    def summand(self) -> torch.Tensor:
        """Of the rank that runs."""
        rows, width = self.shape
        return self.memory[self.rank][: rows * width * self.dtype.itemsize].view(self.dtype).view(rows, width)

    def exchange(self, turn: int) -> list[torch.Tensor]:
        """All ranks' summands, those of the peers where this rank waits for them."""
        found = [normal(*self.shape, dtype=self.dtype, seed=100 * turn + rank) for rank in range(self.world)]
        for rank, values in enumerate(found):
            if rank != self.rank:
                self.place(self.rank, turn % SLOTS, rank).copy_(values.view(self.place(0, 0, 0).dtype))
        self.summand().copy_(found[self.rank])
        return found


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize(("rows", "width"), cases([(1, 64), (3, 96)], [(1, 3584), (33, 4096), (MAX_ROWS, 1024)]))
def test_sums_with_and_without_a_norm(rows: int, width: int, world: int, rank: int, dtype: torch.dtype) -> None:
    peers = Peers(world, rank, rows, width, dtype)
    residual, weight = normal(rows, width, dtype=dtype, seed=8), normal(width, dtype=dtype, seed=9)
    for turn in range(5):
        found = peers.exchange(turn)
        exact = torch.stack(found).double().sum(0)
        if turn % 2:
            total = residual.double() + exact
            out = launch_pushed_sum(
                peers.inbox,
                peers.summand(),
                torch.empty_like(residual),
                rank=rank,
                world=world,
                residual=residual,
                weight=weight,
                eps=1e-6,
            )
            assert error(residual, total) <= 1
            assert error(out, exact_norm(residual, weight, 1e-6)) <= (8 if dtype == FP32 else 1)
        else:
            out = launch_pushed_sum(peers.inbox, peers.summand(), torch.empty_like(residual), rank=rank, world=world)
            assert error(out, exact) <= 1
        for other in set(range(world)) - {rank}:
            sent = peers.place(other, turn % SLOTS, rank).contiguous().view(dtype)
            assert torch.equal(sent, found[rank])
            assert (peers.place(rank, turn % SLOTS, other).contiguous().view(dtype) == found[other]).all()
            assert (peers.place(rank, (turn - 1) % SLOTS, other) == (-0x8000 if dtype == BF16 else MARK)).all()
    assert (peers.inbox.epochs[:rows] == 5).all()
    assert not peers.inbox.epochs[rows:].any()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("rows", "width", "number"), cases([(3, 96, 2), (2, 64, 4)], [(200, 3584, 2), (70, 4096, 8)]))
def test_summands_of_one_rank_are_added_up_and_rounded_first(
    rows: int, width: int, number: int, dtype: torch.dtype
) -> None:
    """As the peers get it, or ranks would not compute the same bits."""
    peers = Peers(2, 1, rows, width, dtype)
    theirs, _ = peers.exchange(0)
    summands = torch.stack([normal(rows, width, dtype=dtype, seed=20 + one) for one in range(number)])
    out = launch_pushed_sum(peers.inbox, summands, torch.empty_like(theirs), rank=1, world=2)
    sent = peers.place(0, 0, 1).contiguous().view(dtype)
    assert error(sent, summands.double().sum(0)) <= (4 if dtype == FP32 else 1)
    assert error(out, theirs.double() + sent.double()) <= 1


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_negative_zeros_are_sent_as_zero(dtype: torch.dtype) -> None:
    """Negative zeros; or the peer would wait for them for ever."""
    peers = Peers(2, 0, 1, 64, dtype)
    peers.exchange(0)
    peers.summand().view(torch.int32).fill_(MARK)
    launch_pushed_sum(peers.inbox, peers.summand(), torch.empty((1, 64), dtype=dtype, device=DEVICE), rank=0, world=2)
    assert not peers.place(1, 0, 0).any()


def test_waiting_kernels_end_when_they_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:  # whose turns take a microsecond
        monkeypatch.setattr(pushed_sum, "TURNS", tl.constexpr(64))
    peers = Peers(2, 0, 2, 64, BF16)
    peers.released.fill_(1)
    for _ in range(4):
        launch_pushed_sum(
            peers.inbox, peers.summand(), torch.empty((2, 64), dtype=BF16, device=DEVICE), rank=0, world=2
        )
    if ON_GPU:
        torch.cuda.synchronize()


def test_the_widest_row_fits_a_place() -> None:
    peers = Peers(2, 1, 1, MAX_ROW_BYTES // 2, BF16)
    exact = torch.stack(peers.exchange(0)).double().sum(0)
    out = launch_pushed_sum(peers.inbox, peers.summand(), torch.empty_like(peers.summand()), rank=1, world=2)
    assert error(out, exact) <= 1
