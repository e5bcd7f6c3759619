"""Pages of four bits on a GPU: the bytes are those of a CPU but for ties, and rows come back as its rows do."""

from collections.abc import Callable
from functools import reduce

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.kv_tiers.tier_memory import PageMove
from mini_infer_engine.kernels.int4_pages import pack_pages, unpack_pages
from mini_infer_engine.runtime.memory.cuda_host_tier import CudaHostTier
from mini_infer_engine.runtime.memory.int4_rows import pack_rows, unpack_rows
from mini_infer_engine.runtime.memory.page_codec import PackedPages, device_tables
from tests.gpu.device import BF16, DEVICE, FP32, GPU_ONLY, KERNELS, cases, normal
from tests.support.tier_copies import moved

Test = Callable[..., None]


def on_kernels(test: Test) -> Test:
    """Runs on a GPU, or under Triton's interpreter."""
    return reduce(lambda marked, mark: mark(marked), KERNELS, test)


def on_gpu(test: Test) -> Test:
    return reduce(lambda marked, mark: mark(marked), GPU_ONLY, test)


def packed(pages: torch.Tensor, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [pages, rows, size / 2] and scales [pages, rows] as columns of memory with odd bytes behind them."""
    _, rows, size = pages.shape
    memory = torch.full((len(ids), rows * (size // 2 + 2) + 24), 0xA5, dtype=torch.uint8, device=DEVICE)
    codes, scales = memory[:, : rows * size // 2], memory[:, rows * size // 2 : -24].view(torch.bfloat16)
    pack_pages(pages, torch.tensor(ids, device=DEVICE), codes, scales, device_tables(size, pages.dtype, DEVICE))
    assert (memory[:, -24:] == 0xA5).all()
    return codes, scales


@on_kernels
@pytest.mark.parametrize(
    ("dtype", "size", "rows"),
    cases([(FP32, 32, 64), (FP32, 64, 70), (FP32, 128, 3)], [(BF16, 32, 96), (BF16, 64, 5760), (BF16, 128, 8200)]),
)
def test_codes_and_scales_are_those_of_a_cpu(dtype: torch.dtype, size: int, rows: int) -> None:
    pages = normal(4, rows, size, dtype=dtype)
    pages[:, :, 5] *= 20
    pages[1, 0] = 0
    codes, scales = packed(pages, [3, 1])
    for place, page in enumerate((3, 1)):
        own_codes, own_scales = pack_rows(pages[page].cpu())
        differing = (codes[place].view(rows, -1).cpu() != own_codes).float().mean()
        assert differing < 2e-3  # elements within rounding errors of a threshold
        assert torch.allclose(scales[place].cpu().float(), own_scales.float(), rtol=2**-7)


@on_kernels
@pytest.mark.parametrize(
    ("dtype", "size", "rows"),
    cases([(FP32, 32, 64), (FP32, 64, 70), (FP32, 128, 3)], [(BF16, 32, 96), (BF16, 64, 5760), (BF16, 128, 8200)]),
)
def test_rows_come_back_as_those_of_a_cpu(dtype: torch.dtype, size: int, rows: int) -> None:
    pages = normal(4, rows, size, dtype=dtype)
    before = pages.clone()
    codes, scales = packed(pages, [3, 1])
    unpack_pages(codes, scales, pages, torch.tensor([0, 2], device=DEVICE), device_tables(size, dtype, DEVICE))
    for place, page in enumerate((0, 2)):
        own = unpack_rows(codes[place].view(rows, -1).cpu(), scales[place].cpu(), dtype)
        assert torch.allclose(pages[page].cpu().float(), own.float(), rtol=2**-7, atol=1e-5)
    assert torch.equal(pages[[1, 3]], before[[1, 3]])
    error = (pages[[0, 2]].double() - before[[3, 1]].double()).norm() / before[[3, 1]].double().norm()
    assert error < 0.1


@on_gpu
@pytest.mark.parametrize("beside", [False, True])
def test_packed_pages_come_back_from_pinned_memory_in_batches(beside: bool) -> None:
    storage = normal(40, 8192 * 128, dtype=BF16)
    hidden = torch.randint(-(2**62), 2**62, (40, 300), device=DEVICE)
    before, states = storage.clone(), hidden.clone()
    codec = PackedPages(storage, 128, [hidden] if beside else [], BF16)
    tier = CudaHostTier(codec, 20, b"")
    codec.most_pages = tier._loading_codec.most_pages = 3
    tier.store(0, [PageMove(page, 19 - page) for page in range(20)])
    stored = moved(tier).digests
    tier.load(1, [PageMove(19 - page, page + 20) for page in range(20)])
    assert moved(tier).digests == stored
    assert len(set(stored)) == 20
    for page in range(20):
        one = before[page].double()
        assert (storage[page + 20].double() - one).norm() / one.norm() < 0.1
    assert torch.equal(hidden[20:], states[:20] if beside else states[20:])
    tier.words[3, 77] ^= 1 << 13
    tier.load(2, [PageMove(3, 39)])
    assert moved(tier).digests != [stored[16]]
