"""What gateways report as samples, rates learned of them, and a service's planner on both."""

import pytest

from mini_infer_contract.scaling import (
    LATENCY_BUCKETS_S,
    EngineLoad,
    GatewayLoads,
    ServiceLoad,
    bucket_of,
    percentile_s,
)
from mini_infer_operator.scaling.plan_state import Fleet
from mini_infer_operator.scaling.policy import ScalingPolicy, Targets, Windows
from mini_infer_operator.scaling.rates import LearnedRates
from mini_infer_operator.scaling.samples import FORGET_S, Observed, ServiceSample, sample_of
from mini_infer_operator.scaling.service_scaler import ServiceScaler

NAME = "default/demo"


def gateway(started_s: float = 1.0, **load: object) -> GatewayLoads:
    return GatewayLoads(started_s, {NAME: ServiceLoad(**load)})  # type: ignore[arg-type]  # fields by name


def samples(*steps: tuple[float, dict[str, GatewayLoads]]) -> list[ServiceSample | None]:
    observed, found = Observed(), []
    for at_s, reports in steps:
        sample, observed = sample_of(observed, reports, NAME, at_s, 0.95)
        found.append(sample)
    return found


def test_sample_has_differences_of_counters_and_sums_over_gateways() -> None:
    engines = {"e": EngineLoad("unified", 4, 1000, 20_000.0)}
    _, found = samples(
        (0.0, {"a": gateway(requests=100, prompt_tokens=5000, answers=50, output_tokens=1000), "b": gateway()}),
        (
            2.0,
            {
                "a": gateway(requests=110, prompt_tokens=9000, answers=60, output_tokens=1200, engines=engines),
                "b": gateway(requests=10, prompt_tokens=1000, queued_requests=3, queued_tokens=500, engines=engines),
            },
        ),
    )
    assert found is not None
    sample = found.sample
    assert (sample.requests_per_s, sample.prompt_tokens_per_s, sample.output_tokens_per_s) == (10.0, 2500.0, 200.0)
    assert (sample.queued_requests, sample.queued_tokens) == (3, 1500.0)  # an engine counts once
    assert (found.rows, found.prefill_tokens_per_s) == (4.0, 20_000.0)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        pytest.param({"a": gateway(2.0, requests=7)}, 7.0, id="a gateway that has started anew counts from zero"),
        pytest.param({"a": gateway(requests=100), "b": gateway(requests=900)}, 0.0, id="a new one counts from now on"),
        pytest.param({}, None, id="no answer is no sample"),
    ],
)
def test_counters_are_no_load_when_gateways_come_and_go(
    second: dict[str, GatewayLoads], expected: float | None
) -> None:
    _, found = samples((0.0, {"a": gateway(requests=100)}), (1.0, second))
    assert (found and found.sample.requests_per_s) == expected


def test_queue_of_a_silent_gateway_counts_for_a_while() -> None:
    silent = {"a": gateway(), "b": gateway(queued_requests=2)}
    alone = {"a": gateway()}
    found = samples((0.0, silent), (5.0, alone), (FORGET_S + 6.0, alone))
    assert [one and one.sample.queued_requests for one in found] == [None, 2, 0]


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.002, 0.5, 239.0, 1e6])
def test_percentile_is_the_bound_of_the_bucket_that_counted(seconds: float) -> None:
    counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
    counts[bucket_of(seconds)] += 1
    bound = percentile_s(counts, 0.95)
    assert bound is not None
    assert seconds <= bound or bound == LATENCY_BUCKETS_S[-1]
    assert percentile_s([], 0.95) is None


def test_rates_are_learned_from_rows_and_times_between_tokens() -> None:
    learned = LearnedRates().prefill(8000.0)
    for step in range(60):
        rows = 1 + step % 20
        learned = learned.decode(rows, (0.02 + 0.001 * rows) / 0.5, prefill_share=0.5)
    rates = learned.rates()
    assert (rates.prefill_tokens_per_s, rates.pass_s, rates.row_s) == pytest.approx((8000.0, 0.02, 0.001), rel=0.02)


@pytest.mark.parametrize(("rows", "itl_s", "share"), [(0, 0.1, 0.0), (3, 0.0, 0.0), (3, 0.1, 0.95)])
def test_samples_that_say_nothing_of_decoding_are_left_out(rows: float, itl_s: float, share: float) -> None:
    assert LearnedRates().decode(rows, itl_s, share) == LearnedRates()


def test_service_goes_to_zero_and_wakes_by_what_its_gateway_holds() -> None:
    scaler = ServiceScaler(NAME)
    policies = {"unified": ScalingPolicy(0, 4, Targets(), Windows(down_s=5.0, zero_s=10.0))}

    def step(at_s: float, **load: object) -> list[tuple[int, int]]:
        fleets = {"unified": Fleet(1, scaler.decided.get("unified", 1))}
        return [(c.before, c.after) for c in scaler.take(policies, fleets, {"a": gateway(**load)}, at_s)]

    idle = [change for at_s in range(30) for change in step(float(at_s))]
    assert idle == [(1, 0)]
    assert step(31.0, queued_requests=1) == [(0, 1)]
    assert scaler.take(policies, {"unified": Fleet(1, 0)}, {}, 500.0) == []  # unheard gateways stop nothing
    assert scaler.decided == {"unified": 1}
