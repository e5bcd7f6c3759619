"""Scattered pieces copied by one launch against copies one by one."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.copy_pieces import SMALL_ROWS, copy_pieces
from tests.gpu.device import DEVICE, KERNELS, cases

pytestmark = KERNELS


@pytest.mark.parametrize(
    ("size", "count", "shift"),
    cases(
        [
            (64, SMALL_ROWS + 3, 0),  # two tiles of rows, the last one not full
            (1040, 5, 0),  # a row longer than a tile's
            (8192, 2, 0),
            (16400, 3, 0),  # longer than a tile of one piece
            (40, 3, 0),  # no multiple of 16
            (64, 3, 4),  # nor are the addresses
        ],
        [(512, 9000, 0), (256 << 10, 300, 0), (7 << 20, 12, 0)],
    ),
)
@pytest.mark.parametrize("programs", [3, 16])
def test_each_piece_arrives_and_nothing_else_changes(size: int, count: int, shift: int, programs: int) -> None:
    dice = np.random.default_rng(size + count)
    capacity = -(-size // 16) * 16 + 32
    source = torch.from_numpy(dice.integers(0, 256, 2 * count * capacity, np.uint8)).to(DEVICE)
    target = torch.full_like(source, 255)
    expected = target.cpu()
    places = [dice.permutation(2 * count)[:count] * capacity + shift for _ in range(2)]
    for here, there in zip(*places, strict=True):
        expected[there : there + size] = source[here : here + size].cpu()
    addresses = [source.data_ptr() + places[0], target.data_ptr() + places[1]]
    pieces = torch.from_numpy(np.stack(addresses, 1).astype(np.int64)).to(DEVICE)
    copy_pieces(pieces, size, is_aligned=not (size % 16 or shift % 16), programs=programs)
    assert torch.equal(target.cpu(), expected)
