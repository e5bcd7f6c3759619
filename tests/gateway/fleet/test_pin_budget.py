"""Pinned tokens of clients, by the time at which they end."""

from mini_infer_gateway.fleet.pin_budget import PinBudget


def test_a_pin_is_refused_when_the_clients_other_pins_leave_no_room() -> None:
    budget = PinBudget(100)
    assert budget.take("a", 60, 10.0, 0.0)
    assert not budget.take("a", 60, 10.0, 5.0)
    assert budget.take("a", 40, 2.0, 5.0)
    assert budget.take("b", 100, 10.0, 5.0)
    assert not budget.take("a", 1, 1.0, 6.9)
    assert budget.take("a", 40, 1.0, 7.0)
    assert budget.take("a", 100, 1.0, 10.0)
    assert not budget.take("c", 101, 1.0, 10.0)


def test_nothing_is_remembered_of_clients_whose_pins_have_ended_or_pin_no_tokens() -> None:
    budget = PinBudget(100)
    for number in range(1000):
        assert budget.take(f"client {number}", 50, 1.0, number * 0.1)
        assert budget.take("empty prompts", 0, 3600.0, number * 0.1)
    assert len(budget) <= 11


def test_many_small_pins_end_one_by_one_when_their_times_differ() -> None:
    budget = PinBudget(1000)
    for number in range(1000):
        assert budget.take("a", 1, float(1000 - number), 0.0)
    assert not budget.take("a", 1, 1.0, 0.5)
    assert budget.take("a", 500, 1.0, 500.0)
    assert not budget.take("a", 1, 1.0, 500.5)
