"""What is learned of transfers: rates that engines tell, and how late first tokens came."""

import pytest

from mini_infer_contract.events import LoadReport
from mini_infer_gateway.fleet.transfer_rates import (
    EXPIRY_S,
    FIRST_BYTES_PER_S,
    FIRST_FIXED_S,
    KV_BYTES_PER_TOKEN,
    LONGEST_FIXED_S,
    TransferRates,
)


def rates_of(**bytes_per_s: float) -> TransferRates:
    rates = TransferRates()
    for name, rate in bytes_per_s.items():
        rates.report(name, LoadReport(0.0, 0, 0, 0, 0.0, transfer_bytes_per_s=rate))
    return rates


@pytest.mark.parametrize(
    ("rates", "bytes_per_s"),
    [
        pytest.param(rates_of(), FIRST_BYTES_PER_S, id="nothing is known"),
        pytest.param(rates_of(decode=1e9, prefill=3e9), 1e9, id="the receiver's word first"),
        pytest.param(rates_of(prefill=3e9, other=9e9), 3e9, id="then the sender's"),
        pytest.param(rates_of(this=2e9, that=4e9), 3e9, id="then everybody's"),
        pytest.param(rates_of(decode=0.0), FIRST_BYTES_PER_S, id="zero: not measured yet"),
    ],
)
def test_link_rate_is_the_slower_side_when_both_engines_report_one(rates: TransferRates, bytes_per_s: float) -> None:
    link = rates.link("decode", "prefill", 0.0)
    assert link.tokens_per_s == pytest.approx(bytes_per_s / KV_BYTES_PER_TOKEN)
    assert link.fixed_s == FIRST_FIXED_S
    assert link.seconds(1000) == pytest.approx(FIRST_FIXED_S + 1000 * KV_BYTES_PER_TOKEN / bytes_per_s)


@pytest.mark.parametrize(("rate", "kv_bytes"), [(5e-324, 2**53), (2.0**53, 1), (1e-300, 0)])
def test_a_link_takes_a_finite_time_when_an_engine_reports_nonsense(rate: float, kv_bytes: int) -> None:
    rates = TransferRates()
    report = LoadReport(0.0, 0, 0, 0, 0.0, transfer_bytes_per_s=rate, kv_bytes_per_token=kv_bytes)
    rates.report("liar", report)
    for ends in (("liar", "decode"), ("decode", "prefill")):
        assert 0.0 < rates.link(*ends, 0.0).seconds(1000) <= 1001.0


def test_transfer_rate_uses_the_models_kv_bytes_per_token() -> None:
    rates = TransferRates()
    rates.report("d", LoadReport(0.0, 0, 0, 0, 0.0, transfer_bytes_per_s=1e8, kv_bytes_per_token=1000))
    assert rates.tokens_per_s("d", "p") == pytest.approx(1e5)


def test_a_transfer_rate_expires_when_it_is_no_longer_reported() -> None:
    rates = TransferRates()

    def report(now_s: float, bytes_per_s: float) -> float:
        rates.report("d", LoadReport(now_s, 0, 0, 0, 0.0, transfer_bytes_per_s=bytes_per_s))
        return rates.tokens_per_s("d", "p") * KV_BYTES_PER_TOKEN

    assert report(0.0, 1e6) == report(EXPIRY_S - 1, 1e6) == pytest.approx(1e6)
    assert report(EXPIRY_S, 1e6) == pytest.approx(FIRST_BYTES_PER_S), "tried once more, and measured"
    assert report(EXPIRY_S + 1, 2e6) == pytest.approx(2e6)


def test_transfer_rates_are_dropped_when_their_endpoints_are_removed() -> None:
    rates = rates_of(decode=1e9, client_left=9e9)
    rates.keep({"decode"})
    assert rates.tokens_per_s("another", "one") == pytest.approx(1e9 / KV_BYTES_PER_TOKEN)


def test_fixed_transfer_cost_is_learned_bounded_and_expires() -> None:
    rates = TransferRates()
    for step in range(100):
        late_s = 0.08 - rates.link("d", "p", step * 0.1).fixed_s
        rates.observe(0.0, late_s, step * 0.1)  # whatever was expected, 80 ms were needed
    learned_s = rates.link("d", "p", 9.9).fixed_s
    assert learned_s == pytest.approx(0.08, rel=0.1)
    later_s = rates.link("d", "p", 9.9 + EXPIRY_S).fixed_s
    assert later_s - FIRST_FIXED_S == pytest.approx((learned_s - FIRST_FIXED_S) / 2)
    for _ in range(1000):
        rates.observe(0.0, 1e9, 10.0)
    assert rates.link("d", "p", 10.0).fixed_s == FIRST_FIXED_S + LONGEST_FIXED_S
    for _ in range(1000):
        rates.observe(1e9, 0.0, 10.0)
    assert rates.link("d", "p", 10.0).fixed_s == 0.0
