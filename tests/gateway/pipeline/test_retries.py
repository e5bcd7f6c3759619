"""When a failed request is tried again, as a table, and what a budget bounds."""

import pytest

from mini_infer_gateway.pipeline.retries import BUDGET_RESERVE, FREE, KILLS, Attempts, Failure, RetryBudget


def attempts(**fields: float) -> Attempts:
    budget = RetryBudget(tokens=fields.pop("tokens", 10.0), refilled_s=50.0)
    return Attempts(budget, limit=3, deadline_s=100.0, **{"count": 1, **fields})  # type: ignore[arg-type]  # a table


@pytest.mark.parametrize("failure", Failure)
def test_every_failure_may_be_tried_elsewhere_and_most_cost_something(failure: Failure) -> None:
    one = attempts()
    assert one.retry(failure, lambda _: True, 50.0)
    assert one.budget.tokens == (10.0 if failure in FREE else 9.0)
    assert one.kills == (failure in KILLS)


@pytest.mark.parametrize(
    ("fields", "now_s", "others"),
    [
        ({"count": 3}, 50.0, True),
        ({}, 100.0, True),
        ({}, 50.0, False),
        ({"tokens": 0.9}, 50.0, True),
        ({"kills": 1}, 50.0, True),
    ],
)
def test_when_it_is_not_tried_again(fields: dict[str, float], now_s: float, others: bool) -> None:
    one = attempts(**fields)
    assert not one.retry(Failure.BROKE, lambda _: others, now_s)
    assert one.budget.tokens == fields.get("tokens", 10.0)


def test_a_fleet_that_fails_everything_gets_a_fifth_more_than_its_load() -> None:
    budget, retries, requests = RetryBudget(), 0, 10_000
    for number in range(requests):
        now_s = number / 1000
        budget.earn(now_s)
        retries += sum(budget.spend(now_s) for _ in range(2))
    assert 0.2 * requests <= retries <= 0.2 * requests + BUDGET_RESERVE + 5 * 10 + 1


def test_a_quiet_time_fills_the_reserve_and_no_more() -> None:
    budget = RetryBudget(tokens=0.0)
    assert budget.spend(1.0)
    budget.earn(3600.0)
    assert budget.tokens == pytest.approx(BUDGET_RESERVE + 0.2)
