"""Predicted waits: they follow the pace at which requests are placed."""

import pytest

from mini_infer_gateway.flow_control.wait_prediction import LONGEST_RETRY_AFTER_S, WaitPrediction, retry_after_s


@pytest.mark.parametrize("pause_s", [0.01, 0.5, 20.0])
def test_predicted_wait_is_the_placement_pause_times_the_requests_ahead(pause_s: float) -> None:
    prediction = WaitPrediction()
    for number in range(200):
        prediction.placed(number * pause_s, still_waiting=True)
    assert prediction.seconds(9, otherwise_s=1e9) == pytest.approx(10 * pause_s)


def test_predicted_wait_weights_the_latest_pauses_most() -> None:
    prediction = WaitPrediction()
    for number in range(100):
        prediction.placed(number * 1.0, still_waiting=True)
    for number in range(100):
        prediction.placed(99.0 + number * 3.0, still_waiting=True)
    assert prediction.seconds(0, 0.0) == pytest.approx(3.0, rel=0.02)


def test_predicted_wait_ignores_times_when_nothing_waits() -> None:
    prediction = WaitPrediction()
    assert prediction.seconds(3, otherwise_s=7.0) == 7.0
    for start_s in (0.0, 1000.0, 5000.0):
        prediction.placed(start_s, still_waiting=True)
        prediction.placed(start_s + 2.0, still_waiting=False)
    assert prediction.seconds(1, otherwise_s=7.0) == pytest.approx(4.0)


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.0, 1), (1.4, 1), (17.6, 18), (1e9, LONGEST_RETRY_AFTER_S)])
def test_retry_after(wait_s: float, seconds: int) -> None:
    assert retry_after_s(wait_s) == seconds
