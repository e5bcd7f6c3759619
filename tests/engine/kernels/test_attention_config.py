"""Which attention kernel a pass with prompts has: what FlashAttention-3 can compute, and the loads that it is given."""

from dataclasses import replace

import pytest
import torch

from mini_infer_engine.kernels.attention.attention_config import (
    PrefillShape,
    hopper_fa3_is_faster,
    supports_hopper_fa3,
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
def test_what_flash_attention_3_can_compute(
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
def test_loads_that_it_is_given(tokens: int, sequences: int, q_heads: int, faster: bool) -> None:
    assert hopper_fa3_is_faster(tokens, sequences, q_heads) is faster
