"""The breaker as a story in time."""

from mini_infer_gateway.fleet.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


def opened() -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(0.0)
    return breaker


def test_opens_only_on_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failed(0.0)
        breaker.succeeded()
    assert not breaker.is_open(0.0)
    assert opened().is_open(0.0)


def test_lets_one_request_try_after_the_pause() -> None:
    breaker = opened()
    assert breaker.is_open(FIRST_PAUSE_S - 0.01)
    assert not breaker.is_open(FIRST_PAUSE_S)
    breaker.started()
    assert breaker.is_open(FIRST_PAUSE_S)
    breaker.succeeded()
    assert breaker.closed


def test_a_try_without_a_verdict_lets_another_try() -> None:
    breaker = opened()
    breaker.started()
    breaker.ended()
    assert not breaker.is_open(FIRST_PAUSE_S)


def test_each_failed_try_doubles_the_pause_up_to_a_limit() -> None:
    breaker, now_s, pauses = opened(), 0.0, []
    for _ in range(8):
        pauses.append(breaker.retry_at_s - now_s)
        now_s = breaker.retry_at_s
        breaker.started()
        breaker.failed(now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, LONGEST_PAUSE_S]
