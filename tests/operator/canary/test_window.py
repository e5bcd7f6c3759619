"""Reports of gateways, added up for a step and for the whole canary."""

import pytest

from mini_infer_contract.rollouts import GatewayRollouts, RevisionFigures
from mini_infer_operator.canary.window import CanaryWindow, growth_bytes

NAME = "default/demo"


def report(started_s: float = 1.0, **revisions: RevisionFigures) -> GatewayRollouts:
    return GatewayRollouts(started_s, {NAME: revisions})


def test_differences_of_counters_are_added_over_gateways() -> None:
    window = CanaryWindow(NAME)
    first = report(new=RevisionFigures(requests=5, ttft_counts=[1, 2]))
    window.take({"a": first, "b": first}, "new", "old", 0, 1.0)
    assert window.observed().new.requests == 0, "what was counted before may belong to another canary"
    later = report(new=RevisionFigures(requests=9, errors=1, ttft_counts=[1, 4, 1]), old=RevisionFigures(requests=7))
    window.take({"a": later, "b": first}, "new", "old", 0, 2.0)
    seen = window.observed()
    assert (seen.new.requests, seen.new.errors, list(seen.new.ttft), seen.stable.requests) == (4, 1, [0, 2, 1], 7)
    window.take({"a": later, "b": later}, "new", "old", 0, 3.0)
    assert window.observed().new.requests == 8


def test_counters_begin_anew_when_a_gateway_restarts() -> None:
    window = CanaryWindow(NAME)
    for figures, started_s in ((10, 1.0), (12, 1.0), (3, 2.0), (4, 2.0)):
        reports = {"a": report(started_s, new=RevisionFigures(requests=figures))}
        window.take(reports, "new", "old", 0, 1.0)
    assert window.observed().new.requests == 2 + 3 + 1


def test_answers_are_kept_and_requests_begin_anew_when_the_next_step_begins() -> None:
    window = CanaryWindow(NAME)
    window.take({"a": report(new=RevisionFigures())}, "new", "old", 0, 1.0)
    figures = RevisionFigures(requests=9, replays=4, divergence_sum=0.5)
    window.take({"a": report(new=figures)}, "new", "old", 0, 2.0)
    window.take({"a": report(new=figures)}, "new", "old", 1, 3.0)
    seen = window.observed().new
    assert (seen.requests, seen.replays, seen.divergence_sum) == (0, 4, 0.5)
    window.take({"a": report(newer=figures)}, "newer", "old", 0, 4.0)
    assert window.observed().new.replays == 0


def test_figures_count_as_none_when_no_gateway_reports_any_more() -> None:
    window = CanaryWindow(NAME)
    assert not window.observed().is_reported
    window.take({"a": report()}, "new", "old", 0, 1.0)
    assert window.observed().is_reported
    window.take({}, "new", "old", 0, 10.0)
    assert window.observed().is_reported
    window.take({}, "new", "old", 0, 30.0)
    assert not window.observed().is_reported


MIB = 1 << 20
STEADY = [(float(second), second * 10 * MIB) for second in range(0, 71, 2)]


@pytest.mark.parametrize(
    ("series", "megabytes"),
    [
        pytest.param([], 0, id="none"),
        pytest.param(STEADY[:20], 0, id="less than a minute"),
        pytest.param(STEADY, 600, id="a leak"),
        pytest.param([(s, min(size, 300 * MIB)) for s, size in STEADY], 0, id="a cache that is full"),
        pytest.param([(s, 500 * MIB) for s, _ in STEADY], 0, id="no growth"),
        pytest.param([(s, 900 * MIB - size) for s, size in STEADY], 0, id="memory is given back"),
    ],
)
def test_growth_counts_when_it_does_not_pause(series: list[tuple[float, int]], megabytes: int) -> None:
    assert growth_bytes(series) == megabytes * MIB
