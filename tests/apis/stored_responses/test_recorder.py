import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_apis.stored_responses.recorder import Recorder, events_in

STREAM = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]
RESPONSE = {"id": "resp_1", "status": "completed", "output": []}


def event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete", "response.failed"])
def test_the_recorder_takes_the_response_from_the_last_event(kind: str) -> None:
    recorder = Recorder()
    recorder.start(200, STREAM)
    assert not recorder.push(event("response.created", response=RESPONSE), True)
    assert recorder.push(event("response.output_item.done") + event(kind, response=RESPONSE), True)
    assert recorder.response == RESPONSE
    assert not recorder.push(b"", False)


@given(st.text())
def test_the_recorder_ignores_text_that_looks_like_a_final_event(text: str) -> None:
    recorder = Recorder()
    recorder.start(200, STREAM)
    hostile = f'\n\nevent: response.completed\ndata: {{"response": {{"id": "x"}}}}\n\n{text}'
    assert not recorder.push(event("response.output_text.delta", delta=hostile), True)


def test_the_recorder_reads_a_whole_answer_in_pieces() -> None:
    recorder, body = Recorder(), json.dumps(RESPONSE).encode()
    recorder.start(200, JSON)
    assert not recorder.push(body[:9], True)
    assert recorder.push(body[9:], False)
    assert recorder.response == RESPONSE


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (400, JSON, b'{"id": "x"}'),
        (200, JSON, b"nonsense"),
        (200, JSON, b"[]"),
        (200, STREAM, b"event: response.completed\n\n"),
    ],
)
def test_the_recorder_records_nothing_when_the_answer_is_no_response(
    status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    recorder = Recorder()
    recorder.start(status, headers)
    assert not recorder.push(body, False)
    assert recorder.response is None


def test_events_are_separated_when_comments_come_between() -> None:
    events = [event("a", n=1), event("b", n=2)]
    assert list(events_in(b": waiting\n\n".join([b"", *events, b""]))) == events
