"""The list of requests: what is kept, for how long, and who sees which of it."""

import gc
import weakref
from typing import Any

import pytest

from mini_infer_gateway.console.request_log import (
    MAX_ERROR_CHARACTERS,
    MAX_FAILED_ATTEMPTS,
    MAX_REQUESTS,
    MAX_TEXT_CHARACTERS,
    USAGE_BYTES,
    RequestLog,
    completion_tokens_of,
    text_of,
)
from mini_infer_gateway.console.viewer import Viewer
from tests.gateway.console.traces import ask, decision

EVERYTHING = Viewer(everything=True)


def ids(log: RequestLog, viewer: Viewer = EVERYTHING, after: int = 0) -> list[str]:
    return [record.request_id for record in log.records(viewer, after)]


def test_a_key_sees_its_own_requests_when_it_is_no_administrators() -> None:
    log = RequestLog()
    ask(log, "mine", key="a")
    ask(log, "theirs", key="b")
    ask(log, "nobodys")
    assert ids(log) == ["nobodys", "theirs", "mine"]
    assert ids(log, Viewer(False, "a")) == ["mine"]
    assert ids(log, Viewer(everything=False)) == []


def test_no_text_is_kept_when_it_is_not_switched_on() -> None:
    log = RequestLog()
    ask(log)
    (record,) = log.records(EVERYTHING)
    assert record.text == ""
    assert "text of one" not in repr(record)


def test_only_new_requests_come_newest_first_when_a_serial_is_given() -> None:
    log = RequestLog()
    for number in range(5):
        ask(log, f"r{number}")
    seen = log.latest
    assert ids(log, after=seen) == []
    ask(log, "new")
    assert ids(log, after=seen) == ["new"]
    assert ids(log)[:2] == ["new", "r4"]


def test_memory_is_bounded_when_many_requests_with_many_attempts_end() -> None:
    log = RequestLog(keeps_texts=True)
    for number in range(MAX_REQUESTS + 50):
        trace = log.begin({"request_id": f"r{number}", "path": "/v1/completions"}, 0.0)
        trace.tokenized({"prompt": "x" * (2 * MAX_TEXT_CHARACTERS)}, 1, 0.0)
        for _ in range(3 if number else 2 * MAX_FAILED_ATTEMPTS):
            trace.sent(decision("e1"), 0.0, 0.0)
            trace.failed("connect", 0.0)
        trace.ended({"outcome": "server_error", "error": "x" * 10_000}, 1.0)
        record = next(log.records(EVERYTHING))
        assert len(record.attempts) == (3 if number else MAX_FAILED_ATTEMPTS)
        assert len(record.text) == MAX_TEXT_CHARACTERS
        assert len(record.error) == MAX_ERROR_CHARACTERS
    assert len(ids(log)) == MAX_REQUESTS
    assert not log.in_flight


class WatchedScope(dict[str, Any]):
    """A scope that can be referenced weakly."""


def test_nothing_of_a_request_is_kept_alive_when_it_has_ended() -> None:
    log = RequestLog()
    trace = log.begin(WatchedScope(request_id="one", path="/v1/completions"), 0.0)
    scope = weakref.ref(trace._scope)
    trace.ended({"outcome": "ok"}, 1.0)
    assert ids(log) == ["one"]
    assert scope() is not None
    del trace
    assert scope() is None


def test_names_that_requests_share_are_kept_once_and_forgotten_when_clients_invent_them() -> None:
    log = RequestLog()
    for number in range(3):
        ask(log, f"r{number}", key="a")
    first, second, third = log.records(EVERYTHING)
    assert first.key is second.key is third.key
    for number in range(2 * MAX_REQUESTS + 5):
        ask(log, f"r{number}", key=f"key {number}")
    assert len(log.finished._known) <= MAX_REQUESTS
    assert [record.key for record in log.records(EVERYTHING)][:2] == [f"key {number}" for number in (2004, 2003)]


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
    ("body", "tokens"),
    [
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":17,"total_tokens":20}}', 17),
        (b'{"usage": {"prompt_tokens": 3, "completion_tokens": 17}}', 17),
        (b'{"usage":{"input_tokens":3,"output_tokens":8}}', 8),
        (b'{"choices":[{"text":"\\"completion_tokens\\":5"}],"usage":{"completion_tokens":2}}', 2),
        (b'{"usage":{"completion_tokens":2}}' + b" " * USAGE_BYTES, -1),
        (b'{"usage":{"completion_tokens":null}}', -1),
        (b'{"usage":{"completion_tokens":' + b"9" * 400 + b"}}", -1),
        (b"{}", -1),
        (b"", -1),
    ],
)
def test_the_usage_of_a_whole_answer_is_found_when_it_stands_at_its_end(body: bytes, tokens: int) -> None:
    assert completion_tokens_of(body) == tokens


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
