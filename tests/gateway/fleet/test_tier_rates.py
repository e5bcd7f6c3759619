"""Rates of tiers as load reports state them."""

import pytest

from mini_infer_contract.events import LoadReport
from mini_infer_gateway.fleet.tier_rates import TierRates

NAMES = ["a", "b", "c"]


def rates_of(**tokens_per_s: tuple[float, float]) -> TierRates:
    rates = TierRates()
    for name, (host, disk) in tokens_per_s.items():
        rates.report(name, LoadReport(0.0, 0, 0, 0, 0.0, host_tokens_per_s=host, disk_tokens_per_s=disk))
    return rates


@pytest.mark.parametrize(
    ("rates", "host", "disk"),
    [
        pytest.param(rates_of(), [0, 0, 0], [0, 0, 0], id="nothing is known"),
        pytest.param(rates_of(a=(100, 0)), [100, 100, 100], [0, 0, 0], id="the mean of the others"),
        pytest.param(rates_of(a=(100, 10), b=(300, 0)), [100, 300, 200], [10, 10, 10], id="its own first"),
    ],
)
def test_unmeasured_tiers_have_the_mean_rate_when_other_endpoints_report(
    rates: TierRates, host: list[float], disk: list[float]
) -> None:
    assert rates.all_tokens_per_s(NAMES) == (host, disk)


def test_rates_of_removed_endpoints_do_not_count_when_the_mean_is_taken() -> None:
    rates = rates_of(a=(100, 1), b=(300, 3))
    rates.keep(["b"])
    assert rates.all_tokens_per_s(NAMES) == ([300] * 3, [3] * 3)
    rates.keep([])
    assert rates.all_tokens_per_s(NAMES) == ([0] * 3, [0] * 3)


def test_a_rate_stays_when_a_later_report_has_none() -> None:
    rates = rates_of(a=(100, 1))
    rates.report("a", LoadReport(1.0, 0, 0, 0, 0.0))
    assert rates.all_tokens_per_s(["a"]) == ([100], [1])
