"""Streams of responses, as bytes: what a client gets is known by its token ids, and each event comes once, numbered."""

import json
import re

import pytest

from mini_infer_gateway.pipeline.response_continuation import ResponseContinuation


class Engine:
    """Tells the answer "ab" in three steps, from the token id on that it is given, numbered from 0."""

    def __init__(self, known: int) -> None:
        self._number = 0
        steps = [[*self._begin(), self._item(), self._delta("a"), ids(1, 2)], [ids(3)], [self._delta("b"), ids(4)]]
        if known:
            self._number = 0
            steps = {2: [[ids(3)], [self._delta("b"), ids(4)]], 3: [[self._delta("b"), ids(4)]], 4: []}[known]
        self.pieces = [*(b"".join(step) for step in steps), self._end()]

    def _event(self, kind: str, body: str = "") -> bytes:
        self._number += 1
        return f'event: {kind}\ndata: {{"type":"{kind}"{body},"sequence_number":{self._number - 1}}}\n\n'.encode()

    def _begin(self) -> list[bytes]:
        return [self._event("response.created"), self._event("response.in_progress")]

    def _item(self) -> bytes:
        return self._event("response.output_item.added")

    def _delta(self, text: str) -> bytes:
        return self._event("response.output_text.delta", f',"delta":"{text}"')

    def _end(self) -> bytes:
        return self._event("response.output_item.done") + self._event("response.completed")


def ids(*token_ids: int) -> bytes:
    listed = ",".join(map(str, token_ids))
    return f'event: token_ids\ndata: {{"type":"token_ids","token_ids":[{listed}]}}\n\n'.encode()


def without_ids(events: bytes) -> bytes:
    return re.sub(rb"event: token_ids\n[^\n]*\n\n", b"", events)


WHOLE = Engine(0).pieces
TOLD = without_ids(b"".join(WHOLE))


def asked(stream: ResponseContinuation) -> bytes:
    return stream.body(b'{"model":"m"}')


def test_a_stream_that_nothing_happens_to_is_told_without_ids() -> None:
    stream = ResponseContinuation.of({}, 5)
    assert asked(stream) == b'{"model":"m","seed":5,"return_token_ids":true}'
    assert b"".join(stream.take(events) for events in WHOLE) == TOLD
    assert (stream.finished, stream.done) == (True, True)


def test_a_client_that_asks_for_ids_gets_them() -> None:
    stream = ResponseContinuation.of({"return_token_ids": True, "seed": 1}, 5)
    assert asked(stream) == b'{"model":"m"}'
    assert b"".join(stream.take(events) for events in WHOLE) == b"".join(WHOLE)


@pytest.mark.parametrize("second_cut", range(5))
@pytest.mark.parametrize("cut", range(len(b"".join(WHOLE).split(b"\n\n"))))
def test_wherever_it_is_cut_each_event_is_told_once(cut: int, second_cut: int) -> None:
    stream, told = ResponseContinuation.of({}, 5), b""
    for limit in (cut, second_cut, None):
        known = asked(stream).partition(b'"resume_token_ids":[')[2]
        pieces = Engine(known.count(b",") + 1 if known else 0).pieces
        if stream.done:
            break
        for event in [part + b"\n\n" for part in b"".join(pieces).split(b"\n\n")[:-1]][:limit]:
            told += stream.take(event)
    assert told == TOLD
    numbers = [json.loads(event.partition(b"data: ")[2])["sequence_number"] for event in told.split(b"\n\n")[:-1]]
    assert numbers == list(range(len(numbers)))


def test_comments_and_errors_go_through_in_their_order() -> None:
    stream = ResponseContinuation.of({}, 5)
    done = b'event: response.output_item.done\ndata: {"sequence_number":3}\n\n'
    error = b'event: error\ndata: {"type":"error","code":"other","sequence_number":4}\n\n'
    failed = b'event: response.failed\ndata: {"sequence_number":5}\n\n'
    assert stream.take(b": still waiting\n\n" + done + error + failed) == b": still waiting\n\n" + done + error + failed
    assert stream.done
