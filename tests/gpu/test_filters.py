"""Thresholds of min-p, top-k and top-p leave the tokens that a sort leaves, whatever the distribution."""

import math
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.sampling import topk_topp as filters
from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.kernels.sampling.topk_topp import topk_topp_thresholds
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, cases, normal

pytestmark = KERNELS

ROUNDING = 5e-7
"""Of a row's mass: fp32 sums, and weights of rounded exponents."""


@dataclass(frozen=True, slots=True)
class Filters:
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0


TOP_KS = (1, 2, 20, 1000, 10**9)
TOP_PS = (1e-6, 0.1, 0.8, 0.95, 0.999999)
ALL_FILTERS = [
    *(Filters(top_k=top_k) for top_k in TOP_KS),
    *(Filters(top_p=top_p) for top_p in TOP_PS),
    *(Filters(top_k=top_k, top_p=top_p, temperature=0.7) for top_k in (2, 20, 1000) for top_p in (0.1, 0.8, 0.999999)),
    *(Filters(min_p=min_p) for min_p in (1e-9, 0.05, 0.9, 1.0)),
    Filters(top_k=20, top_p=0.8, temperature=0.7),
    Filters(top_p=0.8, min_p=0.05),
    Filters(top_p=0.9, min_p=0.05, temperature=30.0),
    Filters(top_k=50, top_p=0.9, min_p=0.01, temperature=1.5),
    Filters(top_p=0.95, temperature=0.1),
    Filters(top_p=0.5, temperature=8.0),
]


def make(name: str, rows: int, vocabulary: int) -> torch.Tensor:
    """[rows, vocabulary] fp32 on the device, each row of the same shape but another order."""
    noise = normal(rows, vocabulary)
    ranks = noise.argsort(dim=1).argsort(dim=1)
    if name == "normal":
        return noise * 3
    if name == "flat":
        return noise * 0.02
    if name == "by rank":
        return 12 - 1.1 * (ranks + 1.0).log()
    if name == "tokens in order":
        return torch.arange(vocabulary, device=noise.device).expand(rows, -1) * (-30.0 / vocabulary)
    if name == "ties":
        return noise.mul(2).round() / 2
    if name == "equal":
        return torch.full_like(noise, 1.5)
    if name == "one above a flat rest":
        return noise * 0.1 + math.log(vocabulary) * (ranks == 0)
    if name == "peak":
        return noise + 40.0 * (ranks == 0)
    if name == "few allowed":
        return torch.where(ranks < vocabulary // 50, noise * 2, -torch.inf)
    assert name == "one allowed"
    return torch.where(ranks == 0, noise, -torch.inf)


SHAPES = (
    "normal", "flat", "by rank", "tokens in order", "ties", "equal",
    "one above a flat rest", "peak", "few allowed", "one allowed",
)  # fmt: skip


def state_of(requested: list[Filters]) -> SamplingState:
    state = SamplingState.zeros(len(requested) + 1, DEVICE)
    state.inverse_temperatures[:-1] = 1 / torch.tensor([row_filters.temperature for row_filters in requested])
    state.top_ks[:-1] = torch.tensor([row_filters.top_k for row_filters in requested], dtype=torch.int32)
    state.top_ps[:-1] = torch.tensor([row_filters.top_p for row_filters in requested])
    state.min_ps[:-1] = torch.tensor([row_filters.min_p for row_filters in requested])
    return state


def slots_of(requested: list[Filters]) -> torch.Tensor:
    return torch.arange(len(requested), dtype=torch.int32, device=DEVICE)


def complaints(
    logits: torch.Tensor, requested: list[Filters], state: SamplingState, thresholds: torch.Tensor
) -> list[str]:
    """What is wrong with which row, by a sort and running sums in double precision."""
    found = []
    for row, row_filters in enumerate(requested):
        values = logits[row][logits[row] > -math.inf].double().sort(descending=True).values
        inverse_temperature, top_p = state.inverse_temperatures[row].double(), state.top_ps[row].double()
        least = torch.tensor(-math.inf, dtype=torch.float64, device=values.device)
        if row_filters.min_p:
            log_min_p = state.min_ps[row].log()
            least = (values[0].float() + log_min_p / state.inverse_temperatures[row]).double()
        if 0 < row_filters.top_k < len(values):
            least = torch.maximum(least, values[row_filters.top_k - 1])
        allowed = int((values >= least).sum())
        kept = int((values >= thresholds[row]).sum())
        if row_filters.top_p >= 1:
            if kept != allowed:
                found.append(f"{row_filters}: {kept} tokens instead of {allowed}")
            continue
        masses = ((values[:allowed] - values[0]) * inverse_temperature).exp().cumsum(dim=0)
        expected = top_p * masses[-1]
        slack = ROUNDING * masses[-1]
        if not 0 < kept <= allowed:
            found.append(f"{row_filters}: {kept} of at most {allowed} tokens")
            continue
        above = int((values > values[kept - 1]).sum())
        if masses[kept - 1] < expected - slack:
            found.append(f"{row_filters}: {kept} tokens have {masses[kept - 1] / expected} of the mass that is wanted")
        if above and masses[above - 1] >= expected + slack:
            found.append(
                f"{row_filters}: {kept} tokens, but {above} have {masses[above - 1] / expected} of what is wanted"
            )
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("vocabulary", "dtype"), cases([(203, FP32)], [(203, BF16), (32_000, FP32), (151_936, BF16), (151_936, FP32)])
)
def test_filter_thresholds_equal_those_of_a_sort(shape: str, vocabulary: int, dtype: torch.dtype) -> None:
    logits = make(shape, len(ALL_FILTERS), vocabulary).to(dtype)
    state = state_of(ALL_FILTERS)
    assert complaints(logits, ALL_FILTERS, state, topk_topp_thresholds(logits, slots_of(ALL_FILTERS), state)) == []


SEARCHED = (Filters(top_k=3), Filters(top_k=400, top_p=0.5), Filters(top_p=0.7), Filters(top_p=0.9, min_p=0.6))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_filters_search_again_when_the_first_candidates_are_too_few(
    shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes at which the interpreter goes through all that happens to large vocabularies."""
    for name, value in {"_CAPACITY_TOKENS": (64, 2048), "_RANK_TOKENS": 16, "_SAMPLE_TOKENS": 2048}.items():
        monkeypatch.setattr(filters, name, value)
    requested = list(SEARCHED) if not ON_GPU else ALL_FILTERS
    logits = make(shape, len(requested), 5000).to(dtype)
    state = state_of(requested)
    assert complaints(logits, requested, state, topk_topp_thresholds(logits, slots_of(requested), state)) == []


@pytest.mark.parametrize(("vocabulary", "dtype"), cases([(5003, FP32)], [(151_936, BF16), (151_936, FP32)]))
def test_a_row_has_the_same_threshold_in_any_batch(vocabulary: int, dtype: torch.dtype) -> None:
    requested = ALL_FILTERS[::6] if not ON_GPU else ALL_FILTERS
    state, slots = state_of(requested), slots_of(requested)
    logits = make("normal", len(requested), vocabulary).to(dtype) / 3
    together = topk_topp_thresholds(logits, slots, state)
    backwards = topk_topp_thresholds(logits.flip(0), slots.flip(0), state).flip(0)
    alone = torch.cat(
        [topk_topp_thresholds(logits[row : row + 1], slots[row : row + 1], state) for row in range(len(requested))]
    )
    assert torch.equal(together, backwards)
    assert torch.equal(together, alone)


def test_rows_without_filters_keep_all_tokens() -> None:
    state = state_of([Filters(), Filters(top_k=5), Filters(top_k=5, top_p=0.5, min_p=0.1)])
    state.inverse_temperatures[2] = 0  # greedy
    logits = normal(3, 300)
    thresholds = topk_topp_thresholds(logits, slots_of([Filters()] * 3), state)
    assert thresholds[[0, 2]].tolist() == [-math.inf, -math.inf]
    assert thresholds[1] == logits[1].topk(5).values[-1]
