"""Grammar masks on the device against those in torch."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import TokenMasks
from mini_infer_engine.kernels.sampling.token_mask import apply_token_masks
from mini_infer_engine.sampling import token_masks
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, cases, normal

pytestmark = KERNELS


@pytest.mark.parametrize(("vocabulary", "dtype"), cases([(259, FP32), (64, FP32)], [(151_936, BF16), (4096, BF16)]))
def test_a_token_whose_bit_is_not_set_gets_minus_infinity(vocabulary: int, dtype: torch.dtype) -> None:
    draw = np.random.default_rng(vocabulary)
    logits = normal(5, vocabulary, dtype=dtype)
    rows, words = [4, 1, 0], -(-vocabulary // 32)
    bits = draw.integers(0, 2**32, (len(rows), words), dtype=np.uint32)
    bits[1], bits[2] = 0, ~np.uint32(0)
    packed = np.concatenate([np.array(rows, dtype=np.int32)[:, None], bits.view(np.int32)], axis=1)
    expected = logits.clone()
    token_masks.apply_token_masks(expected, TokenMasks(rows, bits), [(row, 0) for row in range(5)])
    actual = logits.clone()
    apply_token_masks(actual, torch.from_numpy(packed).to(DEVICE))
    assert torch.equal(actual, expected)
    assert torch.equal(actual[2:4], logits[2:4])


def test_tokens_beyond_the_last_word_are_masked() -> None:
    logits = normal(1, 100)
    packed = torch.tensor([[0, -1, -1]], dtype=torch.int32, device=DEVICE)
    apply_token_masks(logits, packed)
    assert torch.isfinite(logits[0, :64]).all()
    assert torch.isinf(logits[0, 64:]).all()
