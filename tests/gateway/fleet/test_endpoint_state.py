"""How long requests have waited for an endpoint, with the time passed in."""

import asyncio
from unittest.mock import Mock

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.attempt_record import UNANSWERED_PROBE_S, AttemptRecord
from mini_infer_gateway.fleet.breaker import Cause
from mini_infer_gateway.fleet.endpoint_state import EndpointState


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Request:
    can_resume = False

    def move(self, reason: str) -> None:
        pass


def endpoint_state() -> EndpointState:
    subscriber = Mock(report_s=None)  # Its tasks and sockets play no part here.
    return EndpointState(Endpoint(name="a", url="http://a", model="m"), True, subscriber, Mock(spec=asyncio.Task))


def test_waiting_time_adds_up_when_clients_give_up_one_after_the_other() -> None:
    state, clock = endpoint_state(), Clock()
    for _ in range(4):
        record = AttemptRecord(state, Request(), clock)
        clock.now_s += 1.0
        record.close()
        clock.now_s += 60.0  # Nobody waits.
    assert state.liveness_signals.quiet_s(clock.now_s) == 4.0


def test_waiting_time_counts_once_when_clients_wait_side_by_side() -> None:
    state, clock = endpoint_state(), Clock()
    first = AttemptRecord(state, Request(), clock)
    clock.now_s += 1.0
    second = AttemptRecord(state, Request(), clock)
    clock.now_s += 1.0
    first.close()
    assert state.liveness_signals.quiet_s(clock.now_s) == 2.0
    second.close()
    assert state.liveness_signals.quiet_s(clock.now_s) == 2.0


def test_waiting_time_begins_anew_when_a_byte_comes() -> None:
    state, clock = endpoint_state(), Clock()
    AttemptRecord(state, Request(), clock).close()
    waiting, answered = AttemptRecord(state, Request(), clock), AttemptRecord(state, Request(), clock)
    clock.now_s += 5.0
    answered.first_byte(200)
    assert state.liveness_signals.quiet_s(clock.now_s) == 0.0
    clock.now_s += 1.0
    waiting.close()
    assert state.liveness_signals.quiet_s(clock.now_s) == 1.0


def test_an_ejected_endpoint_stays_ejected_when_the_client_that_tries_it_gives_up() -> None:
    state, clock = endpoint_state(), Clock()
    state.ejected(clock.now_s, Cause.SLOW)
    clock.now_s = state.breaker.retry_at_s
    record = AttemptRecord(state, Request(), clock)
    clock.now_s += UNANSWERED_PROBE_S + 0.1
    record.close()
    assert state.breaker.is_open(clock.now_s)
    assert state.breaker.retry_at_s > clock.now_s
