"""When a failed request is tried again, as a table, and what a budget bounds."""

from types import SimpleNamespace
from typing import cast

import pytest

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.memory import BodyBudget, BodyReservation
from mini_infer_gateway.paths import CHAT_PATH, ENGINE_PATHS
from mini_infer_gateway.pipeline.call import Call
from mini_infer_gateway.pipeline.exchange import Exchange
from mini_infer_gateway.pipeline.poison_requests import PoisonRequests
from mini_infer_gateway.pipeline.retries import BUDGET_RESERVE, FREE, KILLS, Failure, RetryBudget
from mini_infer_gateway.pipeline.serving import Serving
from mini_infer_gateway.pipeline.stages.retry import may_retry
from mini_infer_gateway.routing.base import Candidate, Decision, RoutingRequest
from mini_infer_web.api_errors import OPENAI_ERRORS
from mini_infer_web.asgi import Message

FAILED, OTHER = (Endpoint(name=name, url=f"http://{name}", model="m") for name in ("failed", "other"))
DECISION = Decision(decode=FAILED, hit_tokens=0, reason="only", index="none")


def serving(now_s: float = 50.0, tokens: float = 10.0, others: bool = True, circuit_open: bool = False) -> Serving:
    """The parts that a retry needs; endpoints other than the failed one are left if `others`."""
    candidates = [Candidate(OTHER, circuit_open=circuit_open)] if others else []
    parts = SimpleNamespace(
        clock=lambda: now_s,
        settings=SimpleNamespace(max_attempts=3),
        fleet=SimpleNamespace(candidates=lambda names, now_s: candidates),
        router=SimpleNamespace(eligible=lambda request, candidates: candidates),
        retry_budget=RetryBudget(tokens=tokens, refilled_s=50.0),
        poison=PoisonRequests(),
    )
    return cast("Serving", parts)


def call(attempts: int = 1, kills: int = 0) -> Call:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        """Sends nothing."""

    exchange, reservation = Exchange(send, "id", OPENAI_ERRORS), BodyReservation(BodyBudget(1))
    one = Call(ENGINE_PATHS[CHAT_PATH], {"path": CHAT_PATH}, receive, 0.0, exchange, reservation, {})
    one.request, one.attempts, one.kills, one.retry_until_s = RoutingRequest("m", 1), attempts, kills, 100.0
    return one


@pytest.mark.parametrize("failure", Failure)
def test_a_failure_is_retried_elsewhere_and_costs_budget_when_work_was_done(failure: Failure) -> None:
    one, parts = call(), serving()
    assert may_retry(one, DECISION, failure, parts)
    assert parts.retry_budget.tokens == (10.0 if failure in FREE else 9.0)
    assert one.kills == (failure in KILLS)


@pytest.mark.parametrize(
    ("attempts", "kills", "now_s", "tokens", "others"),
    [
        pytest.param(3, 0, 50.0, 10.0, True, id="no attempt left"),
        pytest.param(1, 0, 100.0, 10.0, True, id="no time left"),
        pytest.param(1, 0, 50.0, 10.0, False, id="no other endpoint"),
        pytest.param(1, 0, 50.0, 0.9, True, id="no budget"),
        pytest.param(1, 1, 50.0, 10.0, True, id="a second engine ended"),
    ],
)
def test_no_retry_and_no_cost_when_a_limit_is_reached(
    attempts: int, kills: int, now_s: float, tokens: float, others: bool
) -> None:
    parts = serving(now_s, tokens, others)
    assert not may_retry(call(attempts, kills), DECISION, Failure.BROKE, parts)
    assert parts.retry_budget.tokens == tokens


@pytest.mark.parametrize(("failure", "retried"), [(Failure.OVERLOADED, False), (Failure.STATUS, True)])
def test_overload_is_not_retried_when_all_other_endpoints_are_ejected(failure: Failure, retried: bool) -> None:
    assert may_retry(call(), DECISION, failure, serving(circuit_open=True)) is retried


def test_retries_add_at_most_a_fifth_of_the_load_when_everything_fails() -> None:
    budget, retries, requests = RetryBudget(), 0, 10_000
    for number in range(requests):
        now_s = number / 1000
        budget.earn(now_s)
        retries += sum(budget.spend(now_s) for _ in range(2))
    assert 0.2 * requests <= retries <= 0.2 * requests + BUDGET_RESERVE + 5 * 10 + 1


def test_retry_budget_is_filled_up_to_its_reserve_when_nothing_fails() -> None:
    budget = RetryBudget(tokens=0.0)
    assert budget.spend(1.0)
    budget.earn(3600.0)
    assert budget.tokens == pytest.approx(BUDGET_RESERVE + 0.2)
