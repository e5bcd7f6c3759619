"""One-shot all-reduce and gather: one rank whose peers' memory is on the same device, and who have come everywhere."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

import triton.language as tl

from mini_infer_engine.kernels.all_reduce import one_shot
from mini_infer_engine.kernels.all_reduce.one_shot import MAX_PROGRAMS, launch_gather, launch_reduce
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, cases, error, normal, release_while_waiting
from tests.gpu.exact import exact_norm

pytestmark = KERNELS
FAR = 1 << 20


class Ranks:
    """Buffers and pads of `world` ranks, of which `rank` runs."""

    def __init__(self, world: int, rank: int, buffers: list[torch.Tensor]) -> None:
        self.world, self.rank = world, rank
        self.pads = [torch.zeros((MAX_PROGRAMS, world), dtype=torch.int32, device=DEVICE) for _ in range(world)]
        self.pads[rank] += FAR
        self.epochs = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=DEVICE)
        self.buffers = buffers
        self.released = torch.zeros(1, dtype=torch.int32, pin_memory=ON_GPU)

    @property
    def arguments(self) -> one_shot.Peers:
        """What kernels are told."""
        pointers = [
            torch.tensor([each.data_ptr() for each in group], device=DEVICE) for group in (self.buffers, self.pads)
        ]
        return one_shot.Peers(pointers[0], pointers[1], self.epochs, self.released)

    def check_signals(self, programs: int, calls: int) -> None:
        """Every program of each call has told every rank, its own pad included, and nobody else was told."""
        for pad in self.pads:
            assert (pad[:programs, self.rank] == calls).all()
            assert (pad[programs:, self.rank] == (FAR if pad is self.pads[self.rank] else 0)).all()
        assert (self.epochs[:programs] == calls).all()
        assert not self.epochs[programs:].any()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize(("rows", "width"), cases([(1, 64), (3, 96)], [(33, 3584), (257, 1024), (4096, 3584)]))
def test_sums_with_and_without_a_norm(rows: int, width: int, world: int, rank: int, dtype: torch.dtype) -> None:
    offset = rows * width
    peers = Ranks(world, rank, [normal(2 * offset, dtype=dtype, seed=seed) for seed in range(world)])
    exact = sum(buffer[offset:].view(rows, width).double() for buffer in peers.buffers)
    assert isinstance(exact, torch.Tensor)
    common = {"rank": rank, "world": world}
    made = launch_reduce(peers.arguments, offset, torch.empty((rows, width), dtype=dtype, device=DEVICE), **common)  # type: ignore[arg-type]  # integers
    assert error(made, exact) <= 1
    residual, weight = normal(rows, width, dtype=dtype, seed=8), normal(width, dtype=dtype, seed=9)
    total = residual.double() + exact
    normed = launch_reduce(
        peers.arguments,
        offset,
        torch.empty_like(residual),
        rank=rank,
        world=world,
        residual=residual,
        weight=weight,
        eps=1e-6,
    )
    assert error(residual, total) <= 1
    assert error(normed, exact_norm(residual, weight, 1e-6)) <= (8 if dtype == FP32 else 1)
    peers.check_signals(min(rows, MAX_PROGRAMS), calls=2)


def test_waiting_kernels_end_when_they_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU while kernels wait, by a write to main memory alone."""
    if not ON_GPU:  # whose turns take a microsecond
        monkeypatch.setattr(one_shot, "TURNS", tl.constexpr(64))
    ranks = Ranks(2, 0, [normal(2 * 64, dtype=BF16, seed=seed) for seed in range(2)])
    ranks.pads[0] -= FAR
    arguments = ranks.arguments

    def launch() -> None:
        for _ in range(3):
            launch_reduce(arguments, 0, torch.empty((2, 64), dtype=BF16, device=DEVICE), rank=0, world=2)

    release_while_waiting(ranks.released, launch)


def test_programs_that_share_many_rows_compute_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "MAX_PROGRAMS", 4)
    peers = Ranks(2, 0, [normal(11 * 64, dtype=FP32, seed=seed) for seed in range(2)])
    residual, weight = normal(11, 64, dtype=FP32, seed=8), normal(64, dtype=FP32, seed=9)
    total = residual.double() + sum(buffer.view(11, 64).double() for buffer in peers.buffers)
    out = torch.empty_like(residual)
    launch_reduce(peers.arguments, 0, out, rank=0, world=2, residual=residual, weight=weight, eps=1e-6)
    assert error(residual, total) <= 1
    assert error(out, exact_norm(residual, weight, 1e-6)) <= 8
    peers.check_signals(4, calls=1)


@pytest.mark.parametrize(
    ("rows", "columns", "width"), cases([(2, 48, 90), (1, 4100, 8200)], [(5, 76032, 152064), (256, 76032, 152064)])
)
def test_parts_stand_side_by_side(rows: int, columns: int, width: int) -> None:
    peers = Ranks(2, 1, [normal(rows, columns, dtype=BF16, seed=seed).flatten() for seed in range(2)])
    out = torch.empty((rows, width), dtype=BF16, device=DEVICE)
    launch_gather(peers.arguments, 0, out, columns, rank=1, world=2)
    parts = [buffer.view(rows, columns) for buffer in peers.buffers]
    assert torch.equal(out, torch.cat(parts, dim=1)[:, :width])
    peers.check_signals(min(rows * -(-columns // 4096), MAX_PROGRAMS), calls=1)


def test_programs_that_share_many_blocks_gather_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "MAX_PROGRAMS", 2)
    peers = Ranks(2, 0, [normal(5, 48, dtype=BF16, seed=seed).flatten() for seed in range(2)])
    out = torch.empty((5, 96), dtype=BF16, device=DEVICE)
    launch_gather(peers.arguments, 0, out, 48, rank=0, world=2)
    assert torch.equal(out, torch.cat([buffer.view(5, 48) for buffer in peers.buffers], dim=1))
    peers.check_signals(2, calls=1)
