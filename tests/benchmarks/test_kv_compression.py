"""Figures of benchmarks/kv_compression.py: they measure what they say."""

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kv_compression import kl, share_found


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
