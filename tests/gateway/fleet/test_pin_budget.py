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
