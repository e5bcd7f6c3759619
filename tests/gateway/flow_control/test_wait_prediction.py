"""Predicted waits: they follow what waits turn out to be, within bounds."""

import pytest

from mini_infer_gateway.flow_control.wait_prediction import (
    LEAST_FACTOR,
    LONGEST_RETRY_AFTER_S,
    MOST_FACTOR,
    WaitPrediction,
    retry_after_s,
)


@pytest.mark.parametrize(("truth", "factor"), [(0.5, 0.5), (2.0, 2.0), (0.01, LEAST_FACTOR), (100.0, MOST_FACTOR)])
def test_it_learns_by_how_much_it_is_off(truth: float, factor: float) -> None:
    prediction = WaitPrediction()
    for _ in range(200):
        prediction.learn(prediction.seconds(10_000, 1_000.0), 10.0 * truth)
    assert prediction.seconds(10_000, 1_000.0) == pytest.approx(10.0 * factor, rel=0.05)


def test_moments_teach_nothing() -> None:
    prediction = WaitPrediction()
    prediction.learn(0.001, 3.0)
    prediction.learn(3.0, 0.001)
    assert prediction.factor == 1.0


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.0, 1), (1.4, 1), (17.6, 18), (1e9, LONGEST_RETRY_AFTER_S)])
def test_retry_after(wait_s: float, seconds: int) -> None:
    assert retry_after_s(wait_s) == seconds
