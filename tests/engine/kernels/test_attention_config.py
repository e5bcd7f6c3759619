"""Which attention kernel a pass with prompts has: what FlashAttention-3 can compute, and the loads that it is given."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mini_infer_engine.kernels.attention.attention_config import (
    DecodeConfig,
    PrefillShape,
    decode_config,
    fits_wide_pages,
    hopper_decode_block,
    hopper_fa3_is_faster,
    supports_hopper_fa3,
    wide_pages,
    widening_pays,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPE = PrefillShape(BF16, BF16, 4096, 1, 28, 4, 128, 128, None, 4096)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "window", "longest_key", "supported"),
    [
        (BF16, 128, 128, None, 4096, True),
        (FP16, 64, 256, None, 4096, True),
        (FP32, 128, 128, None, 4096, False),
        (torch.float8_e4m3fn, 128, 128, None, 4096, False),
        (BF16, 96, 128, None, 4096, False),
        (BF16, 128, 64, None, 4096, False),
        (BF16, 128, 128, 4096, 4096, True),  # a window that masks nothing
        (BF16, 128, 128, 4096, 4097, False),
    ],
)
def test_flash_attention_3_supports_shapes(
    dtype: torch.dtype, head_dim: int, page_size: int, window: int | None, longest_key: int, supported: bool
) -> None:
    shape = replace(
        SHAPE,
        pages_dtype=dtype,
        head_dim=head_dim,
        page_size=page_size,
        sliding_window=window,
        longest_key=longest_key,
    )
    assert supports_hopper_fa3(shape) is supported


@pytest.mark.parametrize(
    ("tokens", "sequences", "q_heads", "faster"),
    [
        (8192, 1, 12, True),
        (4096, 64, 28, True),  # a captured pass: padded sequences
        (512, 1, 12, True),
        (512, 8, 28, True),
        (384, 8, 28, True),  # a captured pass, in which eight are only the most
        (384, 9, 28, False),
        (384, 8, 16, False),
        (256, 8, 16, False),
        (256, 8, 28, True),
        (128, 1, 28, False),  # a short tail behind a cached prefix
        (64, 64, 28, False),  # the last tokens only
        (1024, 64, 28, False),  # many short tails
        (0, 0, 28, False),
    ],
)
def test_flash_attention_3_is_chosen_by_load(tokens: int, sequences: int, q_heads: int, faster: bool) -> None:
    assert hopper_fa3_is_faster(tokens, sequences, q_heads) is faster


@pytest.mark.parametrize("one_byte", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"dtype": FP16}, True),
        ({"dtype": FP32}, False),
        ({"pages": 33}, False),
        ({"pages": 0, "wide_pages": 0}, False),
        ({"head_dim": 96}, False),
        ({"head_dim": 64, "page_size": 256}, True),
        ({"page_size": 64}, False),
        ({"sliding_window": 4095}, False),
        ({"sliding_window": 4096}, True),
        ({"caps_scores": True}, False),
    ],
)
def test_one_byte_pages_fit_wide_pages_by_shape(changes: dict[str, object], fits: bool, one_byte: torch.dtype) -> None:
    shape = replace(SHAPE, pages_dtype=one_byte, pages=32, wide_pages=32)
    assert fits_wide_pages(replace(shape, **changes)) is fits  # type: ignore[arg-type]  # fields by name
    assert not fits_wide_pages(replace(shape, pages_dtype=BF16)), "nothing to widen"


@pytest.mark.parametrize(
    ("tokens", "sequences", "q_heads", "kv_heads", "pays"),
    [
        (2048, 1, 28, 4, True),
        (2048, 1, 8, 8, True),
        (512, 8, 28, 4, True),  # a captured pass, of one sequence or of eight
        (512, 8, 16, 8, True),
        (512, 8, 8, 8, False),
        (4096, 64, 16, 8, True),
        (64, 1, 4, 4, False),
        (200, 8, 28, 4, True),
        (100, 8, 28, 4, False),
    ],
)
def test_widening_pays_by_load(tokens: int, sequences: int, q_heads: int, kv_heads: int, pays: bool) -> None:
    shape = replace(SHAPE, tokens=tokens, sequences=sequences, q_heads=q_heads, kv_heads=kv_heads)
    assert widening_pays(shape) is pays


@pytest.mark.parametrize(
    ("longest_sequence", "kv_heads", "pages"),
    [
        (32_768, 4, 512),  # two sequences of a 7B shape, 134 MB
        (131_072, 8, 1024),  # one of an 8B shape, 512 MiB
        (131_072, 32, 256),
        (1, 4, 2),
    ],
)
def test_scratch_memory_fits_two_long_sequences_and_is_bounded(
    longest_sequence: int, kv_heads: int, pages: int
) -> None:
    page_bytes = 2 * 128 * kv_heads * 128 * 2
    assert wide_pages(longest_sequence, 128, page_bytes) == pages
    assert pages * page_bytes <= 512 << 20


@pytest.mark.parametrize(
    ("changed", "block"),
    [
        ({}, 128),
        ({"dtype": FP16, "pages_dtype": FP16}, 128),
        ({"dtype": FP32, "pages_dtype": FP32}, None),
        ({"pages_dtype": torch.float8_e4m3fn}, None),
        ({"caps_scores": True}, None),
        ({"head_dim": 64}, 128),
        ({"head_dim": 96}, None),
        ({"head_dim": 256}, 64),
        ({"page_size": 64}, 64),
        ({"page_size": 16}, None),
        ({"page_size": 384}, 128),
        ({"page_size": 48}, None),
        ({"q_heads": 64, "kv_heads": 4}, 128),
        ({"q_heads": 71, "kv_heads": 1}, None),
        ({"sliding_window": 1000}, 128),
    ],
)
def test_hopper_decode_attention_supports_shapes(changed: dict[str, Any], block: int | None) -> None:
    assert hopper_decode_block(replace(SHAPE, **changed)) == block


@pytest.mark.parametrize(
    ("rows", "kv_heads", "largest", "block", "stages", "programs_per_row"),
    [
        (1, 8, 128, 128, 2, 1.5),
        (64, 1, 64, 64, 2, 1.5),
        (9, 8, 128, 128, 2, 1.25),
        (24, 8, 128, 128, 2, 1.25),
        (25, 8, 128, 64, 3, 1.25),
        (49, 8, 128, 64, 3, 1.25),
        (50, 8, 128, 32, 2, 1.25),
        (512, 8, 128, 32, 2, 1.25),
        (32, 8, 32, 32, 3, 1.25),
        (512, 8, 32, 32, 2, 1.25),
    ],
)
def test_decode_attention_for_hopper_reads_smaller_blocks_when_programs_share_an_sm(
    rows: int, kv_heads: int, largest: int, block: int, stages: int, programs_per_row: float
) -> None:
    config = decode_config(rows, kv_heads, 132, split_kv=True, pdl=True, hopper_block=largest)
    assert config == DecodeConfig(132, block, stages=stages, programs_per_row=programs_per_row, pdl=True, hopper=True)
    whole = decode_config(rows, kv_heads, 132, split_kv=False, pdl=True, hopper_block=largest)
    assert (whole.target_programs, whole.programs_per_row) == (0, 1.0)
    assert not decode_config(rows, kv_heads, 132, split_kv=True, pdl=False, hopper_block=largest).hopper
    assert not decode_config(rows, kv_heads, 132, split_kv=True, pdl=True, hopper_block=None).hopper
