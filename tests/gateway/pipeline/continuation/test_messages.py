"""Streams of Anthropic's events, as bytes: what a client gets is known by its token ids, and each event comes once."""

import pytest

from mini_infer_gateway.pipeline.continuation.messages import MessageContinuation


def event(kind: str, body: str = "") -> bytes:
    return f'event: {kind}\ndata: {{"type":"{kind}"{body}}}\n\n'.encode()


START, PING, OPEN, CLOSE = map(event, ("message_start", "ping", "content_block_start", "content_block_stop"))
DELTA, STOP = event("message_delta", ',"delta":{}'), event("message_stop")


def text(words: str) -> bytes:
    return event("content_block_delta", f',"delta":{{"text":"{words}"}}')


def ids(*token_ids: int) -> bytes:
    return event("ping", f',"token_ids":[{",".join(map(str, token_ids))}]')


WHOLE = [START + PING, OPEN + text("a") + ids(1, 2), ids(3), text("b") + ids(4), CLOSE + DELTA + STOP]
EVENTS = START + PING + OPEN + text("a") + text("b") + CLOSE + DELTA + STOP


def request_body(stream: MessageContinuation) -> bytes:
    return stream.body(b'{"model":"m"}')


def test_token_ids_are_removed_when_a_stream_is_undisturbed() -> None:
    stream = MessageContinuation.of({}, 5)
    assert request_body(stream) == b'{"model":"m","seed":5,"return_token_ids":true}'
    assert b"".join(stream.take(events) for events in WHOLE) == EVENTS
    assert (stream.finished, stream.done) == (True, True)


def test_token_ids_stay_in_the_stream_when_the_client_requested_them() -> None:
    stream = MessageContinuation.of({"return_token_ids": True, "seed": 1}, 5)
    assert request_body(stream) == b'{"model":"m"}'
    assert b"".join(stream.take(events) for events in WHOLE) == b"".join(WHOLE)


@pytest.mark.parametrize("cut", range(len(b"".join(WHOLE).split(b"\n\n"))))
def test_each_event_is_sent_once_when_the_stream_is_cut_at_any_event(cut: int) -> None:
    """The second engine tells the same, from the first token id on that it was not given."""
    whole = [part + b"\n\n" for part in b"".join(WHOLE).split(b"\n\n")[:-1]]
    stream = MessageContinuation.of({}, 5)
    request_body(stream)
    reported = b"".join(stream.take(part) for part in whole[:cut])
    again = request_body(stream)
    known = again.partition(b'"resume_token_ids":[')[2].rstrip(b"]}").count(b",") + 1 if b"resume" in again else 0
    steps = {0: WHOLE, 2: WHOLE[2:], 3: WHOLE[3:], 4: WHOLE[4:]}[known]
    if not stream.done:
        reported += b"".join(stream.take(events) for events in steps)
    assert reported.replace(PING, b"") == EVENTS.replace(PING, b"")


def test_comments_and_other_events_are_forwarded_unchanged() -> None:
    stream = MessageContinuation.of({}, 5)
    error = b'event: error\ndata: {"type":"error","error":{"code":"other"}}\n\n'
    assert stream.take(b": still waiting\n\n" + error) == b": still waiting\n\n" + error


def test_only_the_stop_event_is_left_when_all_tokens_were_sent() -> None:
    assert MessageContinuation.of({}, 5).end == STOP
