"""Penalties on the device against those in torch, which tests/engine/sampling holds to their definition."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.kernels.sampling.penalise import count_sampled, penalised
from mini_infer_engine.kernels.sampling.penalty_state import MAX_COUNT
from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.sampling.penalties import Penalties
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, cases, normal

pytestmark = KERNELS
PARAMS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=-1.5, frequency_penalty=0.3),
    SamplingParams(repetition_penalty=0.7, frequency_penalty=-0.4),
]
SLOTS = [3, 0, 1, 2]


def begun(vocabulary: int) -> Penalties:
    """A slot for each kind, and one for padded rows."""
    penalties = Penalties(len(PARAMS) + 1, vocabulary, DEVICE)
    for slot, params in enumerate(PARAMS):
        known = [(place * 7 + slot) % (vocabulary // 2) for place in range(60)]
        penalties.begin(Row(slot, 0, 60, known, [0], params, output_index=25, known_token_ids=known))
    return penalties


@pytest.mark.parametrize(("vocabulary", "dtype"), cases([(199, FP32), (2500, FP32)], [(151_936, BF16), (5000, BF16)]))
def test_logits_after_penalties(vocabulary: int, dtype: torch.dtype) -> None:
    penalties = begun(vocabulary)
    logits = 4 * normal(len(SLOTS) + 2, vocabulary, dtype=dtype)
    slots = [*SLOTS, len(PARAMS), len(PARAMS)]
    actual = penalised(logits, torch.tensor(slots, dtype=torch.int32, device=DEVICE), penalties)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, penalties.applied(logits, slots), rtol=1e-6, atol=1e-6)
    assert torch.equal(actual[-2:], logits[-2:].float())


def test_chosen_tokens_are_counted_for_penalties() -> None:
    vocabulary = 300
    penalties, expected = begun(vocabulary), begun(vocabulary)
    for each in (penalties, expected):
        each.counts[1, 9] = MAX_COUNT
    state = SamplingState.zeros(len(PARAMS) + 1, DEVICE)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)
    for token in (9, 9, 250):
        state.last_tokens.fill_(token)
        count_sampled(slots, state, penalties)
        expected.count(SLOTS, torch.full((len(SLOTS),), token, device=DEVICE))
    assert torch.equal(penalties.counts[: len(PARAMS)], expected.counts[: len(PARAMS)])
