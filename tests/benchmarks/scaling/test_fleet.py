"""The fleet whose size changes, the rules of other autoscalers as tables, and loads."""

import pytest

from benchmarks.autoscaling import TENTH, Contender, at_cost, equal_cost, measure
from benchmarks.scaling.fleet import ScaledFleet, View
from benchmarks.scaling.loads import in_bursts, noise
from benchmarks.scaling.scalers import Fixed, Hpa, Oracle, Planner, Saturation
from mini_infer_operator.scaling.signals import EngineRates, Sample

MINUTES = [request for request in noise() if request.arrival_s < 240]


def view(
    replicas: int = 4, ready: int = 4, waiting: int = 0, running: int = 0, kv: float = 0.1, now_s: float = 1000.0
) -> View:
    each = [waiting // ready] * ready if ready else []
    return View(now_s, replicas, ready, each, [kv] * ready, running, waiting, Sample(now_s), EngineRates())


def test_every_request_is_answered_when_engines_come_and_go() -> None:
    class Swing:
        every_s = 10.0

        def desired(self, view: View) -> int:
            return 1 if view.now_s % 60 < 30 else 5

    outcome = ScaledFleet(TENTH, Swing(), 2).run(MINUTES)
    assert outcome.requests == len(MINUTES)
    assert 0 < outcome.kept <= outcome.requests
    assert outcome.turns >= 5
    assert outcome.most == 5


def test_gpu_hours_are_those_of_the_engines_that_exist() -> None:
    outcome = ScaledFleet(TENTH, Fixed(3), 3).run(MINUTES)
    assert outcome.gpu_hours == pytest.approx(3 * MINUTES[-1].arrival_s / 3600)
    assert outcome.changes == 0


def test_engine_that_starts_counts_before_it_serves() -> None:
    early = ScaledFleet(TENTH, Fixed(3), 1).run(MINUTES)
    ready = ScaledFleet(TENTH, Fixed(3), 3).run(MINUTES)
    assert early.gpu_hours == pytest.approx(ready.gpu_hours, rel=0.1)
    assert early.kept <= ready.kept


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(view(waiting=16), 8, id="twice the target: twice the engines"),
        pytest.param(view(waiting=8), 4, id="at the target"),
        pytest.param(view(replicas=8, ready=4, waiting=16), 8, id="engines that start use nothing"),
        pytest.param(view(waiting=400), 8, id="at most twice as many in a period"),
        pytest.param(view(waiting=0), 1, id="fewer, as nothing was seen before"),
    ],
)
def test_hpa_follows_the_queue(seen: View, expected: int) -> None:
    assert Hpa(2.0).desired(seen) == expected


def test_hpa_keeps_engines_for_its_window_when_the_queue_is_gone() -> None:
    hpa = Hpa(2.0)
    assert hpa.desired(view(replicas=4, waiting=16, now_s=0.0)) == 8
    assert hpa.desired(view(replicas=8, ready=8, now_s=299.0)) == 8
    assert hpa.desired(view(replicas=8, ready=8, now_s=301.0)) == 1


def test_keda_follows_the_sum_of_running_and_waiting() -> None:
    assert Hpa(10.0, whole=True).desired(view(waiting=20, running=41)) == 7


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(view(kv=0.75), 5, id="little spare memory"),
        pytest.param(view(waiting=12), 5, id="little spare queue"),
        pytest.param(view(replicas=5, kv=0.75), 5, id="one is starting"),
        pytest.param(view(kv=0.9), 5, id="all are saturated"),
        pytest.param(view(kv=0.1), 3, id="one fewer has room"),
        pytest.param(view(kv=0.55), 4, id="one fewer has none"),
    ],
)
def test_saturation_rule_adds_or_removes_one(seen: View, expected: int) -> None:
    assert Saturation().desired(seen) == expected


def test_oracle_starts_engines_before_the_load_comes() -> None:
    late = [request for request in noise(rate=20.0) if 100 < request.arrival_s < 200]
    oracle = Oracle(TENTH, late, 0.5, EngineRates(5_000, 0.036, 0.0003))
    assert oracle.desired(view(now_s=20.0)) == 1
    assert oracle.desired(view(now_s=80.0)) > 3


@pytest.mark.parametrize(("hours", "expected"), [(1.0, 0.25), (2.0, 0.5), (3.0, 0.6), (4.0, 0.7), (9.0, 0.7)])
def test_share_at_equal_cost_lies_between_two_settings(hours: float, expected: float) -> None:
    assert at_cost([(4.0, 0.7), (2.0, 0.5)], hours) == pytest.approx(expected)


def test_bursts_hold_the_same_requests() -> None:
    burst = in_bursts(MINUTES)
    assert sorted(r.prompt_tokens for r in burst) == sorted(r.prompt_tokens for r in MINUTES)
    assert [r.number for r in burst] == list(range(len(burst)))


def test_planner_keeps_targets_of_a_steady_load(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Contender("planner", (0.95,), lambda knob, case: Planner(case.setup, knob))
    monkeypatch.setattr("benchmarks.autoscaling.CONTENDERS", (one,))
    found = measure("noise", MINUTES, float("inf"))
    assert found["runs"]["planner"][0]["attainment"] > 0.95
    assert found["equal_cost"] == equal_cost(found["runs"])
