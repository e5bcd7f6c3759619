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


def test_breaker_opens_only_when_failures_are_consecutive() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(FAILURES_TO_OPEN - 1):
            fail(breaker)
        breaker.succeeded(breaker.started())
    assert not breaker.is_open(0.0)
    assert opened().is_open(0.0)


def test_breaker_opens_when_answers_begin_and_never_complete() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        generation = breaker.started()
        breaker.first_byte(generation)
        breaker.failed(generation, 0.0, Cause.UNREACHABLE)
    assert breaker.is_open(0.0)


def test_breaker_admits_one_probe_request_when_its_pause_has_passed() -> None:
    breaker = opened()
    assert breaker.is_open(FIRST_PAUSE_S - 0.01)
    assert not breaker.is_open(FIRST_PAUSE_S)
    generation = breaker.started()
    assert breaker.is_open(FIRST_PAUSE_S)
    breaker.succeeded(generation)
    assert breaker.closed


def test_breaker_closes_at_first_byte_and_counts_a_later_failure_when_half_open() -> None:
    breaker = opened()
    generation = breaker.started()
    breaker.first_byte(generation)
    assert breaker.closed
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(generation, 100.0, Cause.UNREACHABLE)
    assert breaker.retry_at_s == 102.0, "two openings without a whole answer between them"


def test_breaker_admits_another_probe_when_the_first_ends_without_a_verdict() -> None:
    breaker = opened()
    breaker.ended(breaker.started())
    assert not breaker.is_open(FIRST_PAUSE_S)


def test_breaker_pause_doubles_up_to_a_limit_when_it_opens_again() -> None:
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


def test_breaker_pause_does_not_overflow_when_thousands_of_requests_fail() -> None:
    breaker = Breaker()
    for now_s in range(5_000):
        fail(breaker, float(now_s), Cause.STATUS)
    assert breaker.retry_at_s == 4_999 + LONGEST_PAUSE_S


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("evidence", Evidence)
def test_breaker_closes_by_evidence_other_than_a_request_for_each_cause(cause: Cause, evidence: Evidence) -> None:
    breaker = opened(cause)
    assert breaker.learned(evidence) == breaker.closed == (evidence in CLOSED_BY[cause])
    assert not Breaker().learned(evidence), "nothing to close"


def test_breaker_pause_grows_when_an_endpoint_is_ready_and_keeps_failing() -> None:
    breaker, now_s = opened(Cause.STATUS), 0.0
    for _ in range(3):
        assert not breaker.learned(Evidence.READY)
        now_s = breaker.retry_at_s
        fail(breaker, now_s, Cause.STATUS)
    assert breaker.retry_at_s - now_s == 8.0
