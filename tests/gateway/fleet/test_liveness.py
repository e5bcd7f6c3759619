"""Signs of life and verdicts, as tables; the time is 100 s."""

import pytest

from mini_infer_gateway.fleet.breaker import Cause
from mini_infer_gateway.fleet.liveness import LivenessSignals, is_confirmed, is_suspect, verdict

NOW_S = 100.0


@pytest.mark.parametrize(
    ("signals", "peers", "expected"),
    [
        (LivenessSignals(), [], None),
        (LivenessSignals(report_s=98.0), [], None),
        (LivenessSignals(report_s=96.4), [], Cause.SILENT),
        # A core that reports is believed, however long a prompt takes, as long as its HTTP server answers.
        (LivenessSignals(report_s=99.5, waiting_since_s=10.0), [0.1], None),
        (LivenessSignals(report_s=99.5, waiting_since_s=97.0, unready=True), [], Cause.SLOW),
        (LivenessSignals(report_s=99.5, waiting_since_s=99.0, unready=True), [], None),
        # Others are judged by their peers.
        (LivenessSignals(waiting_since_s=95.9), [0.1, 0.5], Cause.SLOW),
        (LivenessSignals(waiting_since_s=96.1), [0.1, 0.5], None),
        (LivenessSignals(waiting_since_s=50.0, byte_s=97.0), [0.1], None),
        (LivenessSignals(waiting_since_s=95.0), [2.0], None),
        (LivenessSignals(waiting_since_s=93.9), [2.0], Cause.SLOW),
        (LivenessSignals(waiting_since_s=1.0), [], None),
        (LivenessSignals(waiting_since_s=97.0, unready=True), [], Cause.SLOW),
        # Clients that gave up have waited too.
        (LivenessSignals(waiting_since_s=99.5, abandoned_s=3.6), [0.1, 0.5], Cause.SLOW),
        (LivenessSignals(waiting_since_s=99.5, abandoned_s=3.4), [0.1, 0.5], None),
        (LivenessSignals(abandoned_s=4.1), [0.1, 0.5], Cause.SLOW),
        (LivenessSignals(abandoned_s=4.1), [2.0], None),
        (LivenessSignals(report_s=99.5, abandoned_s=60.0), [0.1], None),
    ],
)
def test_verdicts(signals: LivenessSignals, peers: list[float], expected: Cause | None) -> None:
    assert verdict(signals, peers, NOW_S) is expected


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        (LivenessSignals(), False),
        (LivenessSignals(waiting_since_s=97.4), True),
        (LivenessSignals(waiting_since_s=97.6), False),
        (LivenessSignals(waiting_since_s=50.0, byte_s=99.0), False),
        (LivenessSignals(waiting_since_s=99.9, abandoned_s=2.5), True),
    ],
)
def test_an_endpoint_is_probed_when_it_is_suspect(signals: LivenessSignals, expected: bool) -> None:
    assert is_suspect(signals, NOW_S) == expected


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        (LivenessSignals(report_s=96.0), False),
        (LivenessSignals(report_s=96.0, unready=True), True),
        (LivenessSignals(report_s=89.9), True),
        (LivenessSignals(waiting_since_s=90.0), True),
    ],
)
def test_when_requests_are_moved(signals: LivenessSignals, expected: bool) -> None:
    assert is_confirmed(signals, NOW_S) == expected
