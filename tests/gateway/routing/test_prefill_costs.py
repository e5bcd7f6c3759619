"""The sums behind a pair, in seconds worked out by hand."""

from dataclasses import replace
from math import inf

import pytest

from mini_infer_gateway.fleet.transfer_rates import Link
from mini_infer_gateway.routing.prefill_costs import (
    LEAST_TOKENS,
    MOST_DELAY,
    Site,
    break_even_tokens,
    delay_price,
    fetched_s,
    first_token_apart_s,
    local_s,
)

RATE = 10_000.0
QUICK, SLOW = Link(100_000.0, 0.005), Link(5_000.0, 0.005)


def site(missing: float, wait_s: float = 0.0, rate: float = RATE) -> Site:
    return Site(missing, wait_s, rate)


@pytest.mark.parametrize(
    ("rows", "role", "price"),
    [
        (0, "unified", 0.0),
        (4, "unified", 0.5),
        (0, "decode", 1.0),
        (16, "decode", 2.0),
        (1000, "decode", MOST_DELAY),
    ],
)
def test_prefill_delay_price_by_running_rows_and_role(rows: float, role: str, price: float) -> None:
    assert delay_price(rows, role) == price


def test_costs_of_local_prefill_disaggregated_prefill_and_fetch() -> None:
    assert local_s(site(1000, wait_s=0.2), price=1.0) == pytest.approx(0.2 + 0.1 * 2)
    # A quick link is hidden behind the prefill, a slow one is not.
    assert first_token_apart_s(site(1000), site(1000, wait_s=0.3), QUICK) == pytest.approx(0.3 + 0.1 + 0.005)
    assert first_token_apart_s(site(1000), site(1000), SLOW) == pytest.approx(0.2 + 0.005)
    # What the prefill engine holds already is moved all the same.
    assert first_token_apart_s(site(1000), site(10), QUICK) == pytest.approx(0.01 + 0.005)
    # What is fetched while the prompt waits anyway costs nothing.
    assert fetched_s(site(1000, wait_s=0.5), 900, QUICK, 0.0) == pytest.approx(0.5 + 0.01)
    assert fetched_s(site(1000), 900, SLOW, 1.0) == pytest.approx(0.185 + 0.02)


def test_loads_from_slower_tiers_count_once_when_prompts_are_priced() -> None:
    """They delay no other request, and are hidden where another engine computes meanwhile."""
    loads = replace(site(1000, wait_s=0.2), load_s=0.05)
    assert local_s(loads, price=1.0) == pytest.approx(0.2 + 0.05 + 0.1 * 2)
    assert first_token_apart_s(loads, site(1000), QUICK) == pytest.approx(0.1 + 0.005)
    assert first_token_apart_s(site(1000), loads, QUICK) == pytest.approx(0.2 + 0.05 + 0.1 + 0.005)
    assert fetched_s(loads, 900, QUICK, 0.0) == pytest.approx(0.2 + 0.05 + 0.01)


@pytest.mark.parametrize(
    ("decode", "prefill", "link", "price", "tokens"),
    [
        pytest.param(site(1), site(1), QUICK, 1.0, LEAST_TOKENS, id="never below what fits in a step"),
        pytest.param(site(1), site(1), Link(1e5, 0.1), 1.0, 1000, id="a fixed cost"),
        pytest.param(site(1), site(1, wait_s=0.1), QUICK, 1.0, 1050, id="a queue at the prefill engine"),
        pytest.param(site(1, wait_s=0.1), site(1, wait_s=0.2), QUICK, 1.0, 1050, id="beside one at the decode engine"),
        pytest.param(site(1), site(1), QUICK, 0.0, inf, id="nobody decodes: never"),
        pytest.param(site(1), site(1), SLOW, 1.0, inf, id="a link slower than computing: never"),
        pytest.param(
            site(1), site(1), Link(8_000.0, 0.03), 1.0, 400, id="a link that is slower than the prefill engine"
        ),
    ],
)
def test_break_even_tokens_by_engines_link_and_price(
    decode: Site, prefill: Site, link: Link, price: float, tokens: float
) -> None:
    assert break_even_tokens(decode, prefill, link, price) == pytest.approx(tokens)


@pytest.mark.parametrize("price", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_local_and_disaggregated_prefill_cost_the_same_at_break_even(price: float, wait_s: float) -> None:
    tokens = break_even_tokens(site(1), site(1, wait_s), QUICK, price)
    for missing, apart_is_cheaper in ((tokens * 0.9, False), (tokens * 1.1, True)):
        if missing > LEAST_TOKENS / 0.9:
            apart_s = first_token_apart_s(site(missing), site(missing, wait_s), QUICK)
            assert (apart_s < local_s(site(missing), price)) == apart_is_cheaper
