"""Learned rates: what endpoints that do so much would report, and what is made of it."""

import pytest

from mini_infer_contract.events import LoadReport
from mini_infer_gateway.fleet.prefill_rates import FASTEST, FIRST_GUESS, SLOWEST, PrefillRates


def work_off(rates: PrefillRates, name: str, tokens_per_s: float, prompts: int, tokens: int = 65_536) -> None:
    """Prompts one after another in passes of 8,192 tokens: a pass has left the queue when the one before it ends."""
    now_s = 0.0
    for _ in range(prompts):
        rates.report(name, LoadReport(now_s, 0, 0, tokens, 0.0, ["new"]))
        for left in range(tokens - 8192, -1, -8192):
            rates.report(name, LoadReport(now_s, 1, 0, left, 0.0))
            now_s += 8192 / tokens_per_s
        rates.report(name, LoadReport(now_s, 1, 0, 0, 0.0))
        now_s += 10.0  # idle, which says nothing


def test_prefill_rate_is_a_default_until_it_is_measured() -> None:
    assert PrefillRates().tokens_per_s("a") == FIRST_GUESS


@pytest.mark.parametrize("tokens_per_s", [2_000.0, 45_000.0, 300_000.0])
def test_prefill_rate_is_learned_from_load_reports(tokens_per_s: float) -> None:
    rates = PrefillRates()
    for name in ("a", "b"):
        work_off(rates, name, tokens_per_s, 30)
    assert rates.tokens_per_s("a") == rates.tokens_per_s("b") == pytest.approx(tokens_per_s, rel=0.1)
    assert rates.tokens_per_s("another of the fleet") == rates.tokens_per_s("a")


def test_rates_differ_when_an_endpoint_is_slower_than_the_others() -> None:
    rates = PrefillRates()
    for name in ("a", "b", "c"):
        work_off(rates, name, 40_000.0, 30)
    work_off(rates, "slow", 10_000.0, 30)
    assert rates.tokens_per_s("slow") < 0.5 * rates.tokens_per_s("a")
    rates.keep({"a", "b", "c"})
    assert rates.tokens_per_s("slow") == rates.tokens_per_s("a")


@pytest.mark.parametrize(
    "reports",
    [
        [(0.0, 2**53, 0.0), (1e-9, 0, 0.0), (2e-9, 0, 0.0)],
        [(0.0, 2**53, 0.0), (1.0, 0, 0.0), (2.0**53, 0, 0.0)],
        [(0.0, 50_000, 0.0), (1.0, 0, 0.0), (2.0**53, 0, 0.0)],
        [(0.0, 0, 5e-324), (1.0, 0, 2.0**53)],
    ],
)
def test_other_endpoints_keep_a_rate_when_one_reports_nonsense(reports: list[tuple[float, int, float]]) -> None:
    rates = PrefillRates()
    work_off(rates, "a", 40_000.0, 30)
    before = rates.tokens_per_s("a")
    for ts, queued_tokens, prefill_tokens_per_s in reports:
        rates.report("liar", LoadReport(ts, 1, 0, queued_tokens, 0.0, prefill_tokens_per_s=prefill_tokens_per_s))
        assert SLOWEST <= rates.tokens_per_s("a") <= FASTEST
        assert all(SLOWEST <= rate <= FASTEST for rate in rates.all_tokens_per_s(["a", "liar", "other"]))
    rates.keep({"a"})
    assert rates.tokens_per_s("a") == pytest.approx(before)


def test_prefill_rates_are_equal_when_endpoints_differ_by_noise() -> None:
    rates = PrefillRates()
    for name, rate in (("a", 40_000.0), ("b", 44_000.0), ("c", 38_000.0)):
        work_off(rates, name, rate, 30)
    assert rates.tokens_per_s("a") == rates.tokens_per_s("b") == rates.tokens_per_s("c")


def test_prefill_rate_ignores_samples_when_requests_arrive_meanwhile_or_prompts_are_short() -> None:
    rates = PrefillRates()
    for step in range(100):
        rates.report("a", LoadReport(step * 1.0, 1, 0, 50_000 - step, 0.0, ["another"]))
        rates.observe("a", 100, 5.0)
    assert rates.tokens_per_s("a") == FIRST_GUESS


def test_rates_that_engines_measured_replace_estimates_from_their_queues() -> None:
    rates = PrefillRates()
    work_off(rates, "a", 40_000.0, 30)
    for name, reported in (("a", 30_000.0), ("b", 33_000.0), ("slow", 5_000.0)):
        rates.report(name, LoadReport(0.0, 0, 0, 0, 0.0, prefill_tokens_per_s=reported))
    assert rates.tokens_per_s("slow") == 5_000.0
    rates.keep({"a", "b"})
    assert rates.tokens_per_s("a") == rates.tokens_per_s("b") == 31_500.0
    assert rates.tokens_per_s("a decode engine that has computed nothing yet") == 31_500.0
    rates.keep(set())
    assert rates.tokens_per_s("a") == pytest.approx(FIRST_GUESS)
