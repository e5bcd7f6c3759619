"""Figures of benchmarks/kv_compression.py: they measure what they say."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from common.rocketkv_reference import approximate_attention
from kv_compression import Method, Sizes, kl, share_found

SIZES = Sizes(context=1024, token_bytes=240, tier_token_bytes=60.0, page_size=16, num_layers=10)


def logs(*chances: float) -> dict[int, float]:
    return {token: math.log(chance) for token, chance in enumerate(chances)}


def test_kl_is_zero_when_distributions_are_equal() -> None:
    assert kl(logs(0.5, 0.3), logs(0.5, 0.3)) == pytest.approx(0.0)


def test_kl_is_that_of_all_tokens_when_both_lists_have_them_all() -> None:
    expected = 0.7 * math.log(0.7 / 0.2) + 0.3 * math.log(0.3 / 0.8)
    assert kl(logs(0.7, 0.3 - 1e-12), logs(0.2, 0.8 - 1e-12)) == pytest.approx(expected, rel=1e-6)


def test_kl_is_at_most_that_of_all_tokens_when_some_are_in_one_list_only() -> None:
    exact = 0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.1) + 0.1 * math.log(0.1 / 0.4)
    found = kl({0: math.log(0.6), 1: math.log(0.3)}, {0: math.log(0.5), 2: math.log(0.4)})
    assert 0 < found < exact


def test_a_needle_is_found_when_its_number_begins_the_answer() -> None:
    assert share_found([" 1234. The", "1235", "about 1236", ""], ["1234", "1235", "1236", "1237"]) == 0.5


@pytest.mark.parametrize(
    ("method", "kept", "read"),
    [
        (Method("full"), 1024, 1024),
        (Method("policy", kept=lambda sizes: sizes.context * sizes.token_bytes / 4), 256, 256),
        (Method("quest", selected_tokens=128), 1024 + 0.8 * 64, 0.2 * 1024 + 0.8 * (128 + 64)),
        (
            Method("both", selected_tokens=128, kept=lambda sizes: sizes.context * sizes.token_bytes / 4),
            256 + 0.8 * 16,
            0.2 * 256 + 0.8 * (128 + 16),
        ),
        (
            Method("hybrid", selected_tokens=128, is_hybrid=True),
            1024 + 0.8 * 256,
            0.2 * 1024 + 0.8 * (128 + 256 / 8),
        ),
    ],
    ids=lambda each: each.name if isinstance(each, Method) else "",
)
def test_bytes_are_those_of_tokens_and_of_two_keys_a_page_outside_the_dense_layers(
    method: Method, kept: float, read: float
) -> None:
    assert method.kept(SIZES) + method.bounds(SIZES) == pytest.approx(kept * 240)
    assert method.read(SIZES) == pytest.approx(read * 240)


def test_approximate_attention_is_attention_when_pages_have_one_token_and_all_elements_are_read() -> None:
    torch.manual_seed(4)
    queries, keys = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 11, 8)
    seen = torch.arange(11) < torch.tensor([[11], [6]])
    logits = (queries @ keys.transpose(2, 3)).squeeze(2) / math.sqrt(8)
    exact = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(approximate_attention(queries, keys, seen, 1, 8), exact)


def test_approximate_attention_reads_bounds_in_the_largest_elements_when_pages_have_several_tokens() -> None:
    torch.manual_seed(5)
    queries, keys = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 10, 8)
    made = approximate_attention(queries, keys, torch.ones(1, 10, dtype=torch.bool), 4, 3)[0, 0]
    elements = sorted(range(8), key=lambda element: -float(queries[0, 0, :, element].abs().sum()))[:3]
    weights = torch.zeros(10)
    for query in queries[0, 0]:
        logits = []
        for token in range(10):
            page = keys[0, 0, token // 4 * 4 : token // 4 * 4 + 4]
            bounds = [
                page[:, element].max() if queries[0, 0, :, element].sum() > 0 else page[:, element].min()
                for element in elements
            ]
            logits.append(sum(query[element] * bound for element, bound in zip(elements, bounds, strict=True)))
        share = query[elements].abs().sum() / query.abs().sum()
        weights += (torch.stack(logits) / (8 * share).sqrt()).softmax(0) / 2
    torch.testing.assert_close(made, weights)
