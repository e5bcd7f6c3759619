"""Rows of four bits an element: their bytes, the error that they make, and what they do to odd rows."""

import pytest
import torch

from mini_infer_engine.runtime.memory.int4_rows import (
    LEVELS,
    ROW_SIZES,
    pack_rows,
    rotation,
    row_bytes,
    row_size,
    unpack_rows,
)


def back(rows: torch.Tensor) -> torch.Tensor:
    return unpack_rows(*pack_rows(rows), rows.dtype)


def relative_error(rows: torch.Tensor) -> float:
    wide = rows.double()
    return float((back(rows).double() - wide).norm() / wide.norm())


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("size", ROW_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_with_the_error_of_16_levels(size: int, dtype: torch.dtype) -> None:
    rows = drawn(500, size, dtype=dtype)
    codes, scales = pack_rows(rows)
    assert (codes.shape, codes.dtype, scales.shape) == ((500, size // 2), torch.uint8, (500,))
    assert codes[0].nbytes + scales[0].nbytes == row_bytes(size)
    assert relative_error(rows) < 0.1  # 0.0975 is the least of normal numbers (Max 1960)


@pytest.mark.parametrize("size", ROW_SIZES)
def test_rotation_is_orthogonal(size: int) -> None:
    matrix = rotation(size).double()
    assert torch.allclose(matrix @ matrix.mT, torch.eye(size, dtype=torch.float64), atol=1e-6)


def test_large_elements_cost_the_others_nothing_more_when_rows_have_a_few() -> None:
    """Keys have channels that are many times as large as the rest."""
    rows = drawn(500, 64)
    rows[:, [3, 40]] *= 30
    assert relative_error(rows) < 0.13
    largest = rows.abs().amax(1, keepdim=True) / 7.5
    plain = ((rows / largest - 0.5).round().clamp(-8, 7) + 0.5) * largest
    rest = [place for place in range(64) if place not in (3, 40)]
    unrotated = float((plain - rows)[:, rest].norm())
    assert float((back(rows) - rows)[:, rest].norm()) < 0.9 * unrotated


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = drawn(40, 128)
    codes, scales = pack_rows(rows)
    alone_codes, alone_scales = pack_rows(rows[17:18])
    assert torch.equal(codes[17:18], alone_codes)
    assert torch.equal(scales[17:18], alone_scales)


def test_rows_change_little_when_they_are_packed_a_second_time() -> None:
    """Pages that were loaded are evicted again."""
    once = back(drawn(300, 64))
    twice = back(once)
    assert float((twice - once).norm() / once.norm()) < 0.02


@pytest.mark.parametrize("value", [0.0, 1e-30, 3e-8, 1e4])
def test_rows_of_any_size_come_back(value: float) -> None:
    rows = torch.full((2, 64), value)
    rows[1] *= torch.arange(64) % 3 - 1
    found = back(rows)
    assert found.isfinite().all()
    assert float((found - rows).norm()) <= 0.5 * float(rows.norm())


def test_levels_are_bfloat16_numbers() -> None:
    """So that products of tensor cores are exact."""
    assert torch.equal(torch.tensor(LEVELS).bfloat16().float(), torch.tensor(LEVELS))


@pytest.mark.parametrize(
    ("head_dims", "expected"),
    [
        ((128,), 128),
        ((256,), 128),
        ((64,), 64),
        ((96,), 32),
        ((256, 512), 128),
        ((64, 96), 32),
        ((80,), None),
        ((16,), None),
    ],
)
def test_row_is_the_largest_equal_part_of_all_heads(head_dims: tuple[int, ...], expected: int | None) -> None:
    assert row_size(*head_dims) == expected
