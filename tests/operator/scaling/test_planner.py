"""The planner as tables, and over minutes of samples."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

import pytest

from mini_infer_operator.scaling.demand import backlog_engines, utilisation, work_of
from mini_infer_operator.scaling.plan_state import Fleet, Memory, Recommendation
from mini_infer_operator.scaling.planner import plan_replicas
from mini_infer_operator.scaling.policy import ScalingPolicy, Targets, Windows
from mini_infer_operator.scaling.signals import EngineRates, Sample

RATES = EngineRates(prefill_tokens_per_s=10_000, pass_s=0.02, row_s=0.0005)
POLICY = ScalingPolicy(1, 10, Targets(ttft_s=2.0, itl_s=0.1))


def load(at_s: float, requests: float, prompt: float = 1000, output: float = 200, **more: float) -> Sample:
    """Returns a sample of so many requests a second; each is 0.1 s of prompt and 0.1 s of answer."""
    return Sample(at_s, prompt * requests, output * requests, requests, running_requests=int(10 * requests), **more)


def run(
    policies: dict[str, ScalingPolicy],
    seconds: int,
    sample: Callable[[float], Sample],
    begin: dict[str, int] | None = None,
    start_s: float = 20.0,
    every_s: int = 1,
) -> list[dict[str, int]]:
    """Returns the numbers of engines at each step; engines are ready at once."""
    numbers, memory, found = begin or dict.fromkeys(policies, 1), Memory(), []
    for step in range(0, seconds, every_s):
        fleets = {role: Fleet(number, number) for role, number in numbers.items()}
        planned, memory = plan_replicas(policies, fleets, sample(float(step)), RATES, memory, start_s)
        numbers = {role: one.replicas for role, one in planned.items()}
        found.append(numbers)
    return found


@pytest.mark.parametrize(
    ("role", "targets", "expected"),
    [
        pytest.param("unified", Targets(inf), 0.9, id="no target: as busy as may be"),
        pytest.param("unified", Targets(inf, 0.1), 0.76, id="a pass of a slow request is a fifth longer than the mean"),
        pytest.param("prefill", Targets(inf, 0.1), 0.9, id="prefill engines have no time between tokens"),
        pytest.param("unified", Targets(0.12, percentile=0.5), 0.2, id="a target that the prompt alone takes"),
        pytest.param("decode", Targets(0.12, percentile=0.5), 0.9, id="decode engines have no first token"),
        pytest.param("unified", Targets(2.0, percentile=0.95), 0.84, id="waits of a queue at 84 %"),
    ],
)
def test_utilisation_keeps_the_targets_of_the_role(role: str, targets: Targets, expected: float) -> None:
    assert utilisation(role, targets, RATES, prompt_tokens=1000) == pytest.approx(expected, abs=0.005)


def test_work_is_prefill_and_decode_by_measured_rates() -> None:
    work = work_of(load(0.0, 5), RATES)
    assert (work.prefill, work.decode, work.of("unified")) == pytest.approx((0.5, 0.5, 1.0))
    assert (work.of("prefill"), work.of("decode")) == pytest.approx((0.5, 0.5))


def test_backlog_needs_engines_beyond_what_ready_ones_compute_in_time() -> None:
    waiting = load(0.0, 1, queued_tokens=140_000)
    assert backlog_engines("unified", waiting, POLICY.targets, RATES, ready=2, start_s=20.0) == pytest.approx(1.0)
    assert backlog_engines("unified", waiting, POLICY.targets, RATES, ready=7, start_s=20.0) == 0.0
    assert backlog_engines("decode", waiting, POLICY.targets, RATES, ready=0, start_s=20.0) == 0.0


@pytest.mark.parametrize(
    ("requests", "least", "most"),
    [(0.1, 1, 1), (10, 3, 5), (30, 8, 10), (1000, 10, 10)],
)
def test_number_follows_the_load_within_bounds_when_it_is_steady(requests: float, least: int, most: int) -> None:
    assert least <= run({"unified": POLICY}, 60, lambda at_s: load(at_s, requests))[-1]["unified"] <= most


def test_prefill_and_decode_are_planned_in_the_ratio_of_their_work() -> None:
    policies = {"prefill": POLICY, "decode": POLICY}
    long_prompts = run(policies, 60, lambda at_s: load(at_s, 10, prompt=4000))[-1]
    long_answers = run(policies, 60, lambda at_s: load(at_s, 10, prompt=500, output=800))[-1]
    assert long_prompts["prefill"] > long_prompts["decode"]
    assert long_answers["decode"] > long_answers["prefill"]


def test_engines_are_kept_for_the_window_when_the_load_falls() -> None:
    policy = replace(POLICY, windows=Windows(down_s=90.0))
    numbers = run({"unified": policy}, 300, lambda at_s: load(at_s, 20 if at_s < 60 else 1))
    high = numbers[59]["unified"]
    assert high >= 5
    assert numbers[59 + 89]["unified"] == high
    assert numbers[-1]["unified"] < high


def test_new_planner_removes_no_engine_before_it_has_seen_a_window() -> None:
    numbers = run({"unified": POLICY}, 200, lambda at_s: load(at_s, 0.1), begin={"unified": 6})
    assert [one["unified"] for one in numbers[:79]] == [6] * 79
    assert numbers[-1]["unified"] == 1


def test_more_engines_wait_for_the_up_window_when_there_is_one() -> None:
    policy = replace(POLICY, windows=Windows(up_s=30.0))
    numbers = run({"unified": policy}, 120, lambda at_s: load(at_s, 0.1 if at_s < 60 else 30))
    assert numbers[80]["unified"] == 1
    assert numbers[-1]["unified"] > 5


@pytest.mark.parametrize(("min_replicas", "expected"), [(0, 0), (2, 2)])
def test_last_engine_stops_after_the_window_without_requests_when_none_need_stay(
    min_replicas: int, expected: int
) -> None:
    policy = replace(POLICY, min_replicas=min_replicas, windows=Windows(zero_s=100.0))
    numbers = run({"unified": policy}, 400, lambda at_s: load(at_s, 5) if at_s < 50 else Sample(at_s))
    assert numbers[140]["unified"] >= 1
    assert numbers[-1]["unified"] == expected


def test_service_wakes_at_once_when_a_request_waits() -> None:
    policy = replace(POLICY, min_replicas=0, windows=Windows(up_s=60.0, zero_s=10.0))
    asleep = run({"unified": policy}, 200, lambda at_s: Sample(at_s))
    assert asleep[-1]["unified"] == 0
    held = run(
        {"unified": policy}, 200, lambda at_s: Sample(at_s, queued_requests=int(at_s >= 150)), begin={"unified": 0}
    )
    assert [held[149]["unified"], held[150]["unified"]] == [0, 1]


def test_engine_that_starts_is_not_stopped_when_nobody_has_asked_yet() -> None:
    policy, memory = replace(POLICY, min_replicas=0, windows=Windows(zero_s=10.0)), Memory()
    numbers = []
    for at_s in range(60):
        fleets = {"unified": Fleet(1, int(at_s >= 40))}
        planned, memory = plan_replicas({"unified": policy}, fleets, Sample(float(at_s)), RATES, memory)
        numbers.append(planned["unified"].replicas)
    assert (numbers[48], numbers[50]) == (1, 0)


def test_running_requests_keep_the_last_engine_when_none_arrive() -> None:
    policy = replace(POLICY, min_replicas=0, windows=Windows(zero_s=10.0))
    numbers = run({"unified": policy}, 300, lambda at_s: Sample(at_s, running_requests=1))
    assert numbers[-1]["unified"] == 1


def test_tokens_in_flight_set_the_number_when_they_are_the_target() -> None:
    policy = ScalingPolicy(1, 10, Targets(ttft_s=inf, tokens_in_flight=1000))
    assert run({"unified": policy}, 30, lambda at_s: load(at_s, 0.1, tokens_in_flight=3500.0))[-1]["unified"] == 4


def test_missed_targets_add_engines_when_the_model_is_too_hopeful() -> None:
    kept = run({"unified": POLICY}, 400, lambda at_s: load(at_s, 10))[-1]["unified"]
    missed = run({"unified": POLICY}, 400, lambda at_s: load(at_s, 10, ttft_s=3.0))[-1]["unified"]
    assert kept < missed <= 1.6 * kept + 1


@pytest.mark.parametrize(("ready", "most"), [(0, 4), (1, 5), (3, 15)])
def test_few_engines_start_at_a_time_when_they_do_not_become_ready(ready: int, most: int) -> None:
    policy, memory, replicas = replace(POLICY, max_replicas=100), Memory(), max(1, ready)
    for step in range(60):
        sample = load(float(step), 50, queued_tokens=9_000_000)
        planned, memory = plan_replicas({"unified": policy}, {"unified": Fleet(replicas, ready)}, sample, RATES, memory)
        replicas = planned["unified"].replicas
    assert replicas == most


def test_number_does_not_flap_in_an_hour_of_noise() -> None:
    """Requests at random, eight a second, with lengths that vary: the load gives no reason to scale."""
    dice = Random(3)

    def noisy(at_s: float) -> Sample:
        requests = sum(dice.expovariate(1.0) for _ in range(_poisson(dice, 40.0))) / 5
        return load(at_s, requests)

    numbers = [one["unified"] for one in run({"unified": POLICY}, 3600, noisy, every_s=5)]
    settled = numbers[60:]
    changes = sum(a != b for a, b in itertools.pairwise(settled))
    assert changes <= 6
    assert max(settled) - min(settled) <= 2


@pytest.mark.parametrize(
    ("targets", "rate", "itl_s", "most"),
    [
        pytest.param(Targets(2.0, 0.08), 1.0, 0.03, 6, id="time between tokens"),
        pytest.param(Targets(2.0, inf, tokens_in_flight=4000), 0.5, 0.03, 6, id="tokens in flight"),
    ],
)
def test_number_seldom_turns_when_chance_moves_what_runs_and_engines_start_in_seconds(
    targets: Targets, rate: float, itl_s: float, most: int
) -> None:
    """Half an hour of requests at random. Windows of a minute would follow each peak of what runs at a moment."""
    dice, running = Random(1), list[list[float]]()
    rates = EngineRates(prefill_tokens_per_s=20_000, pass_s=itl_s, row_s=0.002)
    policy, number, memory, numbers = ScalingPolicy(1, 10, targets), 1, Memory(), list[int]()
    for second in range(1800):
        pass_s = itl_s + rates.row_s * len(running) / number
        running = [[prompt, left - 1 / pass_s, done + 1 / pass_s] for prompt, left, done in running if left > 0]
        new = [[dice.lognormvariate(6.6, 1.0), dice.lognormvariate(5.0, 0.8), 0.0] for _ in range(_poisson(dice, rate))]
        running += new
        sample = Sample(
            float(second),
            sum(prompt for prompt, *_ in new),
            200.0 * len(new),
            float(len(new)),
            running_requests=len(running),
            tokens_in_flight=sum(prompt + done for prompt, _, done in running),
            itl_s=pass_s,
        )
        fleets = {"unified": Fleet(number, number)}
        planned, memory = plan_replicas({"unified": policy}, fleets, sample, rates, memory, start_s=5.0)
        number = planned["unified"].replicas
        numbers.append(number)
    steps = [after - before for before, after in itertools.pairwise(numbers) if after != before]
    turns = sum((one > 0) != (other > 0) for one, other in itertools.pairwise(steps))
    assert turns <= most


def test_explanation_has_the_figures_that_decided() -> None:
    sample = load(5.0, 10, queued_tokens=400_000)
    planned, _ = plan_replicas({"unified": POLICY}, {"unified": Fleet(1, 1)}, sample, RATES, Memory(), 20.0)
    found: Recommendation = planned["unified"]
    assert "400000 waiting prompt tokens" in found.why
    assert found.replicas > 1


def _poisson(dice: Random, mean: float) -> int:
    count, left = 0, dice.expovariate(1.0)
    while left < mean:
        count, left = count + 1, left + dice.expovariate(1.0)
    return count


def test_answers_count_over_the_seconds_in_which_they_are_decoded() -> None:
    """A request has 4 s of decoding: a step of arrivals is seen as a slope of work, and its end likewise."""
    alone = {"unified": ScalingPolicy(1, 10, Targets(inf))}
    memory, rates = Memory(), []
    for second in range(40):
        sample = load(float(second), 10.0 if 10 <= second < 20 else 0.0, prompt=0)
        _, memory = plan_replicas(alone, {"unified": Fleet(1, 1)}, sample, RATES, memory, 20.0)
        rates.append(memory.output_tokens_per_s)
    assert rates[9] == 0.0
    assert 0.0 < rates[11] < rates[19] < 2000.0
    assert rates[19] > rates[21] > 0.0
    assert rates[39] < 0.02 * rates[19]


def test_engines_stay_for_a_window_after_some_were_added_and_then_follow_what_lasts() -> None:
    """A peak of ten seconds adds engines; the window counts from then, and the peak itself keeps none for longer."""
    policy = ScalingPolicy(1, 10, Targets(2.0, 0.1), Windows(down_s=60.0))

    def peak(at_s: float) -> Sample:
        return load(at_s, 20.0 if 100 <= at_s < 110 else 2.0)

    numbers = [one["unified"] for one in run({"unified": policy}, 400, peak, begin={"unified": 2})]
    most = max(numbers)
    added = max(second for second in range(1, 400) if numbers[second] > numbers[second - 1])
    assert most > numbers[99]
    assert set(numbers[added : added + 60]) == {most}
    assert numbers[added + 140] < most
