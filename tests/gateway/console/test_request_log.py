"""The list of requests: what is kept, for how long, and who sees which of it."""

import gc
from typing import Any

import pytest

from mini_infer_gateway.console.request_log import (
    MAX_ERROR_CHARACTERS,
    MAX_REQUESTS,
    MAX_STEPS,
    MAX_TEXT_CHARACTERS,
    RequestLog,
    text_of,
)
from mini_infer_gateway.console.viewer import Viewer
from tests.gateway.console.traces import Answered, ask, decision

EVERYTHING = Viewer(everything=True)


def test_a_row_has_the_times_of_all_phases_when_a_request_has_ended() -> None:
    log = RequestLog()
    ask(log, "one")
    (row,) = log.rows(EVERYTHING)
    assert (row.id, row.model, row.status, row.outcome, row.engine, row.reason) == (
        *("one", "m", 200, "ok"),
        *("e1", "cached_prefix"),
    )
    assert (row.duration_s, row.first_byte_s, row.queue_s) == (1.0, 0.5, 0.2)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.attempts) == (64, 32, 7, 1)


def test_the_timeline_tells_every_attempt_when_one_failed() -> None:
    log = RequestLog()
    trace = log.begin({"request_id": "two", "path": "/v1/chat/completions"}, 10.0)
    trace.tokenized({}, 5, 10.1)
    trace.sent(decision("e1"), Answered(), 0.0, 10.2)
    trace.failed("connect", 10.3)
    trace.sent(decision("e2"), Answered(3), 0.5, 10.9)
    trace.answered(11.0)
    trace.ended({"outcome": "ok", "status": 200}, 12.0)
    detail = log.find(EVERYTHING, "two")
    assert detail is not None
    steps = [(step.at_s, step.step, step.engine) for step in detail.timeline]
    assert steps == [
        (0.0, "arrived", ""),
        (pytest.approx(0.1), "tokenized", ""),
        (pytest.approx(0.2), "sent", "e1"),
        (pytest.approx(0.3), "failed", ""),
        (pytest.approx(0.4), "queued", ""),
        (pytest.approx(0.9), "sent", "e2"),
        (pytest.approx(1.0), "first_byte", ""),
        (pytest.approx(2.0), "ended", ""),
    ]
    assert detail.timeline[3].detail == "connect"
    assert detail.request.attempts == 2


def test_the_beginning_of_an_error_is_kept_when_it_is_long() -> None:
    log = RequestLog()
    ask(log, "one", error="x" * 100_000)
    (row,) = log.rows(EVERYTHING)
    assert len(row.error) == MAX_ERROR_CHARACTERS
    assert sum(len(str(value)) for trace in log._finished for value in trace.facts.values()) < 1000


def test_a_key_sees_its_own_requests_and_no_engine_when_it_is_no_administrators() -> None:
    log = RequestLog(keeps_texts=True)
    ask(log, "mine", key="a", error="the endpoint e1 failed")
    ask(log, "theirs", key="b")
    ask(log, "nobodys")
    assert {row.id for row in log.rows(EVERYTHING)} == {"mine", "theirs", "nobodys"}
    (row,) = log.rows(Viewer(False, "a"))
    assert (row.id, row.engine, row.reason, row.error) == ("mine", "", "", "")
    assert log.find(Viewer(False, "a"), "theirs") is None
    assert log.rows(Viewer(everything=False)) == []
    detail = log.find(Viewer(False, "a"), "mine")
    assert detail is not None
    assert not [step for step in detail.timeline if step.engine or "e1" in step.detail]
    assert detail.text == "text of mine"


def test_no_text_is_kept_when_it_is_not_switched_on() -> None:
    log = RequestLog()
    trace = ask(log)
    assert trace.text == ""
    assert "text of one" not in repr([getattr(trace, name, None) for name in trace.__slots__])


def test_only_new_rows_come_newest_first_when_a_serial_is_given() -> None:
    log = RequestLog()
    for number in range(5):
        ask(log, f"r{number}")
    seen = log.latest
    assert log.rows(EVERYTHING, seen) == []
    ask(log, "new")
    assert [row.id for row in log.rows(EVERYTHING, seen)] == ["new"]
    assert [row.id for row in log.rows(EVERYTHING, 0, most=2)] == ["new", "r4"]


def test_memory_is_bounded_when_many_requests_with_many_attempts_end() -> None:
    log = RequestLog(keeps_texts=True)
    for number in range(MAX_REQUESTS + 50):
        trace = log.begin({"request_id": f"r{number}", "path": "/v1/completions"}, 0.0)
        trace.tokenized({"prompt": "x" * (2 * MAX_TEXT_CHARACTERS)}, 1, 0.0)
        for _ in range(3 if number else 2 * MAX_STEPS):
            trace.sent(decision("e1"), Answered(), 0.0, 0.0)
            trace.failed("connect", 0.0)
        assert len(trace.steps) <= MAX_STEPS
        assert len(trace.text) == MAX_TEXT_CHARACTERS
        trace.ended({"outcome": "server_error"}, 1.0)
    assert len(log.rows(EVERYTHING)) == MAX_REQUESTS
    assert not log.in_flight


def test_a_forgotten_request_needs_no_garbage_collector_when_it_leaves_the_list() -> None:
    log = RequestLog()
    ask(log)
    gc.collect()
    gc.disable()
    try:
        for _ in range(MAX_REQUESTS + 10):
            ask(log)
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "b"),
        ({"messages": [{"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]}, "a"),
        ({"prompt": "p"}, "p"),
        ({"prompt": ["p", "q"]}, "p q"),
        ({"prompt": [1, 2]}, ""),
        ({"input": [{"role": "user"}]}, ""),
        ({"messages": "x"}, ""),
        ({"messages": [7]}, ""),
        ({}, ""),
    ],
)
def test_the_last_text_is_found_when_a_body_has_any_form(fields: dict[str, Any], text: str) -> None:
    assert text_of(fields) == text
