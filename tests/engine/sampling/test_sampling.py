"""Sampling: what may be chosen, how often, and that nobody else has a say in it."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.sampling.reference import build_sampling, exponential_noise, noise_key, sample

CPU = torch.device("cpu")
NOISE_KEYS = [-6411193824288604561, 3681697457321254924, -5139054673906264337]
NOISE_VALUES = [0.32163920998573303, 0.5479831099510193, 0.8090895414352417]


def row(seed: int = 0, index: int = 0, suppressed: tuple[int, ...] = (), **params: Any) -> Row:
    return Row(0, 0, 1, None, [], SamplingParams(**params), seed, index, suppressed)


def choose(logits: Tensor, rows: list[Row]) -> list[int]:
    return sample(logits, build_sampling(rows, logits.shape[-1], CPU)).tolist()


def allowed_by_reference(logits: list[float], params: SamplingParams) -> set[int]:
    """vLLM's definition, token by token: temperature, then min-p, then top-k, then top-p."""
    scaled = [value / params.temperature for value in logits]
    top = max(scaled)
    kept = [token for token, value in enumerate(scaled) if math.exp(value - top) >= params.min_p]
    if params.top_k > 0:
        ranked = sorted((scaled[token] for token in kept), reverse=True)
        border = ranked[min(params.top_k, len(ranked)) - 1]
        kept = [token for token in kept if scaled[token] >= border]
    kept.sort(key=lambda token: -scaled[token])
    total = sum(math.exp(scaled[token] - top) for token in kept)
    mass, result = 0.0, set()
    for token in kept:
        if mass >= params.top_p * total and result:
            break
        result.add(token)
        mass += math.exp(scaled[token] - top)
    return result


PARAMS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": -1},
    {"top_k": 1000},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.7, "temperature": 1.7},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_sampling_chooses_exactly_the_allowed_tokens(params: dict[str, Any]) -> None:
    # Spread so little that each allowed token is chosen within the draws.
    logits = [random.Random(token).uniform(-1, 1) for token in range(24)]
    rows = [row(seed, 1, **params) for seed in range(4000)]
    chosen = set(choose(torch.tensor([logits]).expand(len(rows), -1), rows))
    expected = allowed_by_reference(logits, SamplingParams(**params))
    temperature = params.get("temperature", 1.0)
    likely = {token for token in expected if math.exp((logits[token] - max(logits)) / temperature) > 0.05}
    assert likely <= chosen <= expected


def test_sampled_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 0.2]])
    draws = 40_000
    for temperature in (1.0, 2.5):
        # The same seed with a running index, then the same index with running seeds: both must be independent draws.
        for rows in (
            [row(99, index, temperature=temperature) for index in range(draws)],
            [row(seed, 5, temperature=temperature) for seed in range(draws)],
        ):
            counts = torch.bincount(torch.tensor(choose(logits.expand(draws, -1), rows)), minlength=8).double()
            expected = (logits[0].double() / temperature).softmax(0) * draws
            assert chi_square(counts, expected) < 24.3, counts  # 99.9 % of the distribution with 7 degrees of freedom


def test_draws_from_a_large_vocabulary_follow_the_softmax_independently() -> None:
    """5000 tokens are many groups, the last shorter. Seeds and positions follow each other, as they do in service."""
    vocabulary, draws = 5000, 20_000
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(3)) * 2
    probabilities = logits[0].double().softmax(0)
    for varied in (lambda count: row(7, count), lambda count: row(count, 7)):
        chosen = []
        for first in range(0, draws, 2000):
            chosen += choose(logits.expand(2000, -1), [varied(first + index) for index in range(2000)])
        expected = probabilities * draws
        single = expected >= 5
        counts = torch.bincount(torch.tensor(chosen), minlength=vocabulary).double()
        counts = torch.cat((counts[single], counts[~single].sum(0, keepdim=True)))
        expected = torch.cat((expected[single], expected[~single].sum(0, keepdim=True)))
        assert chi_square(counts, expected) < most_chi_square(len(counts) - 1)
        # Neither the token's group nor its place there tells anything of those of the next draw.
        for trait in ([token // 8 % 128 // 16 for token in chosen], [token % 8 for token in chosen]):
            trait = torch.tensor(trait)
            pairs = torch.bincount(trait[:-1] * 8 + trait[1:], minlength=64).double()
            shares = torch.bincount(trait, minlength=8).double() / draws
            assert chi_square(pairs, torch.outer(shares, shares).flatten() * (draws - 1)) < most_chi_square(49)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return ((counts - expected) ** 2 / expected).sum().item()


def most_chi_square(degrees: int) -> float:
    """Four standard deviations above the mean."""
    return degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("vocabulary", [1, 8, 100, 1024, 1025, 8191, 8193, 20_000])
def test_every_token_of_any_vocabulary_can_be_sampled(vocabulary: int) -> None:
    """Each of them once is the only likely one: the groups leave none out and name none twice."""
    tokens = sorted({0, vocabulary // 3, vocabulary // 2, vocabulary - 2, vocabulary - 1} - {-1})
    logits = torch.full((len(tokens), vocabulary), -math.inf)
    logits[range(len(tokens)), tokens] = 1.0
    assert choose(logits, [row(seed) for seed in range(len(tokens))]) == tokens


def test_sampling_noise_is_exponential_and_uncorrelated() -> None:
    keys = torch.tensor([[noise_key(1, 0)], [noise_key(1, 1)], [noise_key(2, 0)]])
    noise = exponential_noise(keys, 200_000).double()
    assert noise.min() > 0
    assert torch.allclose(noise.mean(1), torch.ones(3, dtype=torch.double), atol=0.01)
    assert torch.allclose(noise.var(1), torch.ones(3, dtype=torch.double), atol=0.03)
    for first, second in ((noise[0], noise[1]), (noise[0], noise[2]), (noise[0, 1:], noise[0, :-1])):
        assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 0.01


def test_sampling_noise_bits_are_pinned() -> None:
    """Pinned: a seed that a client keeps must give the same text in the next release."""
    assert [noise_key(seed, index) for seed, index in ((0, 0), (1, 7), (2**63 - 1, 4096))] == NOISE_KEYS
    assert exponential_noise(torch.tensor([[NOISE_KEYS[1]]]), 3)[0].tolist() == pytest.approx(NOISE_VALUES, rel=1e-6)


def test_the_largest_sampling_noise_is_finite() -> None:
    """This key's first hash is all ones: its token must not lose to none at all."""
    assert exponential_noise(torch.tensor([[-3487469807577879104]]), 1).item() == pytest.approx(24 * math.log(2))


def test_a_sampled_token_depends_only_on_its_own_row() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(PARAMS), 300, generator=generator) * 3
    rows = [row(seed * 77, seed, (seed, 250), **params) for seed, params in enumerate(PARAMS)]
    together = choose(logits, rows)
    for index, alone in enumerate(rows):
        assert choose(logits[index : index + 1], [alone]) == [together[index]]
    order = torch.randperm(len(rows), generator=generator).tolist()
    assert choose(logits[order], [rows[index] for index in order]) == [together[index] for index in order]


def test_greedy_rows_choose_the_argmax_beside_random_rows() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(-1).tolist()
    assert choose(logits, [row(temperature=0.0)] * 3) == best
    mixed = choose(logits, [row(temperature=0.0), row(temperature=9.0, seed=4), row(temperature=1e-6)])
    assert [mixed[0], mixed[2]] == [best[0], best[2]]


def test_suppressed_tokens_are_not_sampled_and_logits_are_unchanged() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0], [9.0, 8.0, 1.0]])
    before = logits.clone()
    rows = [row(suppressed=(0,), temperature=0.0), row(temperature=0.0)]
    assert choose(logits, rows) == [1, 0]
    rows = [row(seed, suppressed=(0, 1)) for seed in range(50)]
    assert set(choose(logits[:1].expand(50, -1), rows)) == {2}
    assert torch.equal(logits, before)
