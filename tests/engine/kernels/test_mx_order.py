"""The order of MXFP4 values: each step of the kernel, in plain integers, yields the columns that the order promises."""

import pytest
import torch

from mini_infer_engine.kernels.gemm.grouped_weight import dequantized_groups, ordered_for_mx_experts, packed_pairs
from mini_infer_engine.kernels.gemm.mx_order import FACTOR_OF_SCALE, mx_ordered, mx_scales, mx_unordered
from tests.support.grouped_weights import random_weight

SIGNS, NUMBERS = 0x80008000, 0x01C001C0


def test_each_step_yields_two_columns_as_bf16_when_words_are_ordered() -> None:
    integers = torch.randint(0, 16, (8, 128), generator=torch.Generator().manual_seed(1))
    words = mx_ordered(packed_pairs(integers)).view(torch.int32).long() & 0xFFFFFFFF  # two words each
    steps = (
        words & (SIGNS | NUMBERS),
        (words << 3) & (SIGNS | NUMBERS),
        ((words << 1) & SIGNS) | ((words >> 3) & NUMBERS),
        ((words << 2) & SIGNS) | ((words << 6) & NUMBERS),
    )
    halves = torch.stack([torch.stack((step & 0xFFFF, step >> 16), dim=-1) for step in steps], dim=-2)
    found = halves.to(torch.uint16).view(torch.bfloat16).double() * 2.0**126  # row, two words, step, word of both
    by_column = found.unflatten(1, (-1, 4)).movedim(3, 2).reshape(integers.shape)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    assert torch.equal(by_column, torch.where(integers < 8, 1, -1) * table[integers & 7])


@pytest.mark.parametrize("shape", [(8, 16), (24, 64), (2, 8, 208)])
def test_the_order_is_undone_when_values_are_ordered(shape: tuple[int, ...]) -> None:
    values = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    unordered = mx_unordered(mx_ordered(values))
    assert unordered.shape[-1] % 64 == 0
    assert torch.equal(unordered[..., : shape[-1]], values)


def test_eight_rows_of_a_step_are_contiguous_when_values_are_ordered() -> None:
    rows = torch.arange(16, dtype=torch.uint8)[:, None].expand(16, 128)  # every value of a row is the same
    ordered = mx_ordered(rows * 17).flatten()
    blocks = ordered.view(2, 2, 8, 64)  # of eight rows and 128 columns
    assert torch.equal(blocks, mx_ordered(rows[:, :64] * 17).view(2, 1, 8, 64).expand(2, 2, 8, 64))


def test_factors_are_scales_in_blocks_when_groups_are_odd() -> None:
    exponents = torch.arange(28, 155, dtype=torch.uint8)[None].repeat(8, 1)
    factors = mx_scales(exponents)
    assert factors.shape == (8, 128)
    of_rows = factors.view(32, 8, 4).transpose(0, 1).reshape(8, 128)
    assert torch.equal(of_rows[:, :127].double() / FACTOR_OF_SCALE, torch.exp2(exponents.double() - 127))


def test_factors_are_limited_when_scales_have_none() -> None:
    scales = torch.tensor([[0, 254]], dtype=torch.uint8).repeat(8, 1)
    least, largest = mx_scales(scales).flatten()[:2].double() / FACTOR_OF_SCALE
    assert (least, largest) == (2.0**-99, 2.0**27)


def test_a_stack_dequantises_to_the_same_when_it_is_ordered() -> None:
    weight = random_weight("mxfp4", 16, 96)
    ordered = ordered_for_mx_experts(weight)
    assert ordered.kind == "mxfp4"
    assert torch.equal(dequantized_groups(ordered), dequantized_groups(weight))


def test_a_stack_stays_as_it_is_when_its_rows_are_no_whole_blocks() -> None:
    weight = random_weight("mxfp4", 6, 96)
    assert ordered_for_mx_experts(weight) is weight


@pytest.mark.parametrize("form", ["nvfp4", "int4-32", "int8-row"])
def test_a_stack_stays_as_it_is_when_the_kernel_has_no_such_weights(form: str) -> None:
    weight = random_weight(form, 6, 96)
    assert ordered_for_mx_experts(weight) is weight
