"""Log probabilities by the two-stage kernels against those of torch operators."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.sampling.top_logprobs import MAX_TOP_LOGPROBS, top_logprobs
from mini_infer_engine.sampling.logprobs import PackedLogprobs, token_logprobs
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, cases, normal

pytestmark = KERNELS
FP16 = torch.float16


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype", "top"),
    cases(
        [(3, 259, FP32, 5), (2, 2100, FP32, 20), (2, 1025, BF16, 3), (1, 40, FP16, MAX_TOP_LOGPROBS), (2, 30, BF16, 0)],
        [(32, 151_936, BF16, 5), (32, 151_936, BF16, 20), (64, 128_256, FP32, 32), (256, 50_257, FP16, 1)],
    ),
)
def test_kernels_and_torch_operators_tell_the_same(rows: int, vocabulary: int, dtype: torch.dtype, top: int) -> None:
    logits = normal(rows, vocabulary, dtype=dtype) * 4
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tokens = torch.randint(vocabulary, (rows + 1,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    slots = torch.arange(rows, 0, -1, dtype=torch.int32, device=DEVICE)
    reported = top_logprobs(logits, order.int(), slots, order.int(), tokens, top)
    exact = token_logprobs(logits[order], tokens[slots[order].long()], top).read([top] * rows)
    for ours, theirs, row in zip(PackedLogprobs(reported.cpu()).read([top] * rows), exact, order.tolist(), strict=True):
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)
        best = logits[row].float().sort(descending=True, stable=True).indices[:top]  # of equal logits the lower token
        assert ours.top_token_ids == best.tolist()


def test_named_tokens_take_the_place_of_the_most_likely_ones_row_by_row() -> None:
    logits, rows = normal(2, 300), integers(0, 1)
    named = torch.tensor([[7, 299, -1], [-1, -1, -1]], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([5, 6], device=DEVICE)
    first, second = PackedLogprobs(top_logprobs(logits, rows, rows, rows, tokens, 3, named).cpu()).read([2, 3])
    exact = logits.log_softmax(dim=-1)
    assert first.top_token_ids == [7, 299]
    assert first.top_logprobs == pytest.approx([exact[0, 7].item(), exact[0, 299].item()], abs=1e-5)
    assert second.top_token_ids == exact[1].topk(3).indices.tolist()


def test_suppressed_tokens_are_reported_last() -> None:
    logits = torch.full((1, 1500), float("-inf"), device=DEVICE)
    logits[0, 1400], logits[0, 3] = 2.0, 1.0
    row, token = integers(0), torch.tensor([3], device=DEVICE)
    (reported,) = PackedLogprobs(top_logprobs(logits, row, row, row, token, 3).cpu()).read([3])
    assert reported.top_token_ids == [1400, 3, 0]
    assert reported.top_logprobs == pytest.approx([-0.31326, -1.31326, float("-inf")], abs=1e-4)
    assert reported.rank == 2
