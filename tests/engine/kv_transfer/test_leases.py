"""Leases and estimates, as tables."""

import pytest

from mini_infer_engine.kv_transfer.estimates import (
    LEAST_WAIT_S,
    RateMeter,
    fetching_pays,
    late_after_s,
    prefill_estimate_s,
)
from mini_infer_engine.kv_transfer.protocol.leases import LeaseTable


def test_a_lease_expires_once_unless_it_is_renewed() -> None:
    table: LeaseTable[str] = LeaseTable()
    table.open("a", 0.0, 10.0)
    table.open("b", 0.0, 10.0)
    table.renew("a", 5.0, 10.0)
    table.renew("a", 6.0, 1.0)  # never made shorter
    table.renew("unknown", 5.0, 10.0)
    assert not table.has_expired(9.9)
    assert table.expire(9.9) == []
    assert table.has_expired(10.0)
    assert table.expire(10.0) == ["b"]
    assert table.expire(15.0) == ["a"]
    assert len(table) == 0
    assert not table.close("a")


def test_a_lease_does_not_expire_when_it_is_closed() -> None:
    table: LeaseTable[int] = LeaseTable()
    table.open(1, 0.0, 1.0)
    assert table.close(1)
    assert table.expire(100.0) == []


@pytest.mark.parametrize(
    ("queued", "tokens", "rate", "num_bytes", "bytes_per_s", "expected"),
    [
        (0, 4096, 0.0, 10, 10.0, None),
        (0, 4096, 4096.0, 0, 0.0, 1.0),
        (4096, 4096, 4096.0, 100, 50.0, 4.0),
        (0, 4096, 4096.0, 100, 0.0, 1.0),
    ],
)
def test_prefill_estimate_counts_queue_tokens_and_bytes(
    queued: int, tokens: int, rate: float, num_bytes: int, bytes_per_s: float, expected: float | None
) -> None:
    assert prefill_estimate_s(queued, tokens, rate, num_bytes, bytes_per_s) == expected


@pytest.mark.parametrize(
    ("estimate_s", "timeout_s", "expected"),
    [(None, 30.0, 30.0), (1.0, 30.0, 2.0), (20.0, 30.0, 30.0), (0.001, 30.0, LEAST_WAIT_S), (0.001, 0.1, 0.1)],
)
def test_a_transfer_is_late_after_twice_its_estimate(
    estimate_s: float | None, timeout_s: float, expected: float
) -> None:
    assert late_after_s(estimate_s, timeout_s) == expected


@pytest.mark.parametrize(
    ("bytes_per_s", "tokens_per_s", "refused", "expected"),
    [
        (0, 0, 0, True),
        (100, 0, 0, True),
        (0, 1, 0, True),
        (100, 9, 0, True),
        (100, 11, 0, False),
        (100, 11, 15, False),
        (100, 11, 16, True),  # what was slow once is measured again
    ],
)
def test_a_prefix_is_fetched_when_that_is_faster_than_computing(
    bytes_per_s: float, tokens_per_s: float, refused: int, expected: bool
) -> None:
    assert fetching_pays(100, 1000, bytes_per_s, tokens_per_s, refused) is expected


def test_rate_meter_follows_measurements() -> None:
    meter = RateMeter()
    meter.add(0, 1.0)
    meter.add(5, 0.0)
    assert meter.per_s == 0.0
    meter.add(100, 1.0)
    assert meter.per_s == 100.0
    for _ in range(30):
        meter.add(10, 1.0)
    assert meter.per_s == pytest.approx(10.0, rel=0.01)
