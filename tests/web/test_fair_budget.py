"""How a limited amount is shared among clients."""

from hypothesis import given
from hypothesis import strategies as st

from mini_infer_web.fair_budget import ALPHA, FairBudget

LIMIT = 1000
TAKES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 600)), max_size=60)


@given(TAKES)
def test_a_newcomer_has_room_when_others_have_taken_all_that_they_may(takes: list[tuple[str, int]]) -> None:
    budget, taken = FairBudget(LIMIT), dict.fromkeys("abc", 0)
    for client, amount in takes:
        if taken[client] + amount > LIMIT:
            continue  # One that is alone has room for anything.
        if budget.take(amount, client):
            taken[client] += amount
    assert budget.used == sum(taken.values())
    if max(taken.values()) <= LIMIT * ALPHA // (ALPHA + 1):
        assert budget.used <= LIMIT - LIMIT // (ALPHA + 1) ** 3
        assert budget.take(1, "newcomer")


def test_a_client_leaves_a_part_when_it_takes_as_much_as_it_may() -> None:
    budget = FairBudget(LIMIT)
    while budget.take(10, "greedy"):
        pass
    assert budget.used == LIMIT * ALPHA // (ALPHA + 1)
    assert not budget.take(LIMIT - budget.used, "other")
    assert budget.take(160, "other")
    assert not budget.take(1, "other")
    budget.give_back(160, "other")
    budget.give_back(800, "greedy")
    assert budget.used == 0
    assert not budget._by_client


def test_several_clients_leave_a_part_when_their_amounts_are_large() -> None:
    budget = FairBudget(LIMIT)
    assert budget.take(400, "a")
    assert not budget.take(600, "b")
    assert budget.take(480, "b")
    assert budget.take(90, "newcomer")


def test_one_alone_has_room_when_it_takes_more_than_the_limit() -> None:
    budget = FairBudget(LIMIT)
    assert budget.take(2 * LIMIT, "large")
    assert not budget.take(1, "other")
