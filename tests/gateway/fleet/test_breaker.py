"""The breaker as a story in time."""

import pytest

from mini_infer_gateway.fleet.breaker import (
    CLOSED_BY,
    FAILURES_TO_OPEN,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Breaker,
    Cause,
    Evidence,
)


def fail(breaker: Breaker, now_s: float = 0.0, cause: Cause = Cause.UNREACHABLE) -> None:
    breaker.failed(breaker.started(), now_s, cause)


def opened(cause: Cause = Cause.UNREACHABLE) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        fail(breaker, cause=cause)
    return breaker


def test_opens_only_on_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(FAILURES_TO_OPEN - 1):
            fail(breaker)
        breaker.succeeded(breaker.started())
    assert not breaker.is_open(0.0)
    assert opened().is_open(0.0)


def test_answers_that_begin_and_never_end_do_not_count_as_success() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        generation = breaker.started()
        breaker.first_byte(generation)
        breaker.failed(generation, 0.0, Cause.UNREACHABLE)
    assert breaker.is_open(0.0)


def test_lets_one_request_try_after_the_pause() -> None:
    breaker = opened()
    assert breaker.is_open(FIRST_PAUSE_S - 0.01)
    assert not breaker.is_open(FIRST_PAUSE_S)
    generation = breaker.started()
    assert breaker.is_open(FIRST_PAUSE_S)
    breaker.succeeded(generation)
    assert breaker.closed


def test_the_first_byte_of_the_trying_request_closes_it_and_its_end_may_still_fail() -> None:
    breaker = opened()
    generation = breaker.started()
    breaker.first_byte(generation)
    assert breaker.closed
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(generation, 100.0, Cause.UNREACHABLE)
    assert breaker.retry_at_s == 102.0, "two openings without a whole answer between them"


def test_a_try_without_a_verdict_lets_another_try() -> None:
    breaker = opened()
    breaker.ended(breaker.started())
    assert not breaker.is_open(FIRST_PAUSE_S)


def test_each_opening_doubles_the_pause_up_to_a_limit() -> None:
    breaker, now_s, pauses = opened(), 0.0, []
    for _ in range(8):
        pauses.append(breaker.retry_at_s - now_s)
        now_s = breaker.retry_at_s
        fail(breaker, now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, LONGEST_PAUSE_S]


def test_requests_that_were_out_when_it_opened_neither_lengthen_the_pause_nor_close_it() -> None:
    breaker = Breaker()
    before = [breaker.started() for _ in range(100)]
    for generation in before:
        breaker.failed(generation, 0.0, Cause.UNREACHABLE)
    assert breaker.retry_at_s == FIRST_PAUSE_S
    breaker.first_byte(before[0])
    breaker.succeeded(before[0])
    assert not breaker.closed


def test_thousands_of_failures_without_another_endpoint_do_not_overflow() -> None:
    breaker = Breaker()
    for now_s in range(5_000):
        fail(breaker, float(now_s), Cause.STATUS)
    assert breaker.retry_at_s == 4_999 + LONGEST_PAUSE_S


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("evidence", Evidence)
def test_what_closes_it_without_a_request(cause: Cause, evidence: Evidence) -> None:
    breaker = opened(cause)
    assert breaker.learned(evidence) == breaker.closed == (evidence in CLOSED_BY[cause])
    assert not Breaker().learned(evidence), "nothing to close"


def test_an_endpoint_that_is_always_ready_and_always_fails_waits_longer_each_time() -> None:
    breaker, now_s = opened(Cause.STATUS), 0.0
    for _ in range(3):
        assert not breaker.learned(Evidence.READY)
        now_s = breaker.retry_at_s
        fail(breaker, now_s, Cause.STATUS)
    assert breaker.retry_at_s - now_s == 8.0
