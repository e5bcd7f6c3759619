"""When prompts of a queue get their first tokens, and whether one more may join them."""

from math import inf

import pytest

from mini_infer_engine.core.scheduling.policy import Pending
from mini_infer_engine.core.scheduling.queue_forecast import Capacity, excess_s, first_token_waits_s

FAST = Capacity(prefill_tokens_per_s=100, free_slots=8, ends_per_s=0)


def entry(latest_start: float, tokens: int, due_s: float = inf, *, priority: int = 0, running: bool = False) -> Pending:
    return Pending((priority, latest_start, 0), tokens, due_s, running)


@pytest.mark.parametrize(
    ("queue", "capacity", "waits_s"),
    [
        pytest.param([entry(0, 50), entry(1, 100)], FAST, [0.5, 1.5], id="prompts one after the other"),
        pytest.param(
            [entry(0, 50), entry(1, 100), entry(2, 100)],
            Capacity(100, free_slots=1, ends_per_s=0.5),
            [0.5, 3.0, 5.0],
            id="those without a slot wait for ends",
        ),
        pytest.param(
            [entry(0, 50, running=True), entry(1, 100)],
            Capacity(100, free_slots=1, ends_per_s=0.5),
            [0.5, 1.5],
            id="those that run have their slots",
        ),
        pytest.param(
            [entry(0, 50), entry(1, 50)], Capacity(100, free_slots=0, ends_per_s=0), [0.5, 1.0], id="no end known yet"
        ),
    ],
)
def test_first_token_waits_by_queue_and_capacity(
    queue: list[Pending], capacity: Capacity, waits_s: list[float]
) -> None:
    assert first_token_waits_s(queue, capacity) == pytest.approx(waits_s)


@pytest.mark.parametrize(
    ("new", "queue", "expected"),
    [
        pytest.param(entry(1, 100, due_s=12), [entry(0, 100)], 0, id="in time"),
        pytest.param(entry(1, 100, due_s=11.5), [entry(0, 100)], 0.5, id="late behind another"),
        pytest.param(entry(0, 100, due_s=11), [entry(1, 100)], 0, id="overtakes one without a target"),
        pytest.param(entry(0, 100, due_s=11), [entry(1, 100, due_s=11.5)], 0.5, id="would make another late"),
        pytest.param(entry(0, 100, due_s=11), [entry(1, 100, due_s=10.5)], 0, id="the other is late anyway"),
        pytest.param(
            entry(0, 100, due_s=11),
            [entry(0, 100, due_s=11.5, priority=1)],
            0,
            id="a lower priority is no reason to refuse",
        ),
        pytest.param(entry(0, 100), [entry(1, 100, due_s=11.5)], 0.5, id="without a target, and in the way"),
        pytest.param(entry(1, 1000), [entry(0, 100)], 0, id="without targets nothing is late"),
    ],
)
def test_a_request_is_refused_when_a_target_would_be_missed(
    new: Pending, queue: list[Pending], expected: float
) -> None:
    assert excess_s(new, queue, FAST, now_s=10.0) == pytest.approx(expected)


def test_waits_count_more_when_a_margin_is_given() -> None:
    new = entry(0, 100, due_s=11.05)
    assert excess_s(new, [], FAST, now_s=10.0) == 0
    assert excess_s(new, [], FAST, now_s=10.0, margin=1.1) == pytest.approx(0.05)
