"""Streams of responses, as bytes: what a client gets is known by its token ids, and each event comes once, numbered."""

import json
import re

import pytest

from mini_infer_gateway.pipeline.continuation.responses import ReplayedResponse, ResponseContinuation


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
EVENTS = without_ids(b"".join(WHOLE))


def request_body(stream: ResponseContinuation) -> bytes:
    return stream.body(b'{"model":"m"}')


def test_token_ids_are_removed_when_a_stream_is_undisturbed() -> None:
    stream = ResponseContinuation.of({}, 5)
    assert request_body(stream) == b'{"model":"m","seed":5,"return_token_ids":true}'
    assert b"".join(stream.take(events) for events in WHOLE) == EVENTS
    assert (stream.finished, stream.done) == (True, True)


def test_token_ids_stay_in_the_stream_when_the_client_requested_them() -> None:
    stream = ResponseContinuation.of({"return_token_ids": True, "seed": 1}, 5)
    assert request_body(stream) == b'{"model":"m"}'
    assert b"".join(stream.take(events) for events in WHOLE) == b"".join(WHOLE)


@pytest.mark.parametrize("second_cut", range(5))
@pytest.mark.parametrize("cut", range(len(b"".join(WHOLE).split(b"\n\n"))))
def test_each_event_is_sent_once_when_the_stream_is_cut_at_any_event(cut: int, second_cut: int) -> None:
    stream, reported = ResponseContinuation.of({}, 5), b""
    for limit in (cut, second_cut, None):
        known = request_body(stream).partition(b'"resume_token_ids":[')[2]
        pieces = Engine(known.count(b",") + 1 if known else 0).pieces
        if stream.done:
            break
        for event in [part + b"\n\n" for part in b"".join(pieces).split(b"\n\n")[:-1]][:limit]:
            reported += stream.take(event)
    assert reported == EVENTS
    numbers = [json.loads(event.partition(b"data: ")[2])["sequence_number"] for event in reported.split(b"\n\n")[:-1]]
    assert numbers == list(range(len(numbers)))


def test_comments_and_errors_are_forwarded_in_order() -> None:
    stream = ResponseContinuation.of({}, 5)
    done = b'event: response.output_item.done\ndata: {"sequence_number":3}\n\n'
    error = b'event: error\ndata: {"type":"error","code":"other","sequence_number":4}\n\n'
    failed = b'event: response.failed\ndata: {"sequence_number":5}\n\n'
    assert stream.take(b": still waiting\n\n" + done + error + failed) == b": still waiting\n\n" + done + error + failed
    assert stream.done


@pytest.mark.parametrize("second_cut", range(5))
@pytest.mark.parametrize("cut", range(len(b"".join(WHOLE).split(b"\n\n"))))
def test_each_event_is_sent_once_when_a_response_is_replayed(cut: int, second_cut: int) -> None:
    stream, reported = ReplayedResponse.of({}, 5), b""
    for limit in (cut, second_cut, None):
        assert b"resume_token_ids" not in request_body(stream)
        for event in [part + b"\n\n" for part in b"".join(Engine(0).pieces).split(b"\n\n")[:-1]][:limit]:
            reported += stream.take(event)
        if stream.done:
            break
    assert reported == EVENTS
    assert stream.possible


@pytest.mark.parametrize(("known", "possible"), [(1, True), (2, False), (3, True)])
def test_the_remaining_text_is_sent_when_a_replay_splits_its_deltas_otherwise(known: int, possible: bool) -> None:
    """Three steps, of which the second has two tokens, told in one piece."""

    def delta(number: int, text: str, tokens: int) -> bytes:
        listed = ",".join(["{}"] * tokens)
        kind = "response.output_text.delta"
        body = f'{{"type":"{kind}","delta":"{text}","logprobs":[{listed}],"sequence_number":{number}}}'
        return f"event: {kind}\ndata: {body}\n\n".encode()

    stream = ReplayedResponse.of({}, 5)
    request_body(stream)
    before = [(delta(0, "a", 1), [1]), (delta(0, "a", 2), [1, 2]), (delta(0, "a", 1) + delta(1, "bc", 2), [1, 2, 3])]
    stream.take(before[known - 1][0] + ids(*before[known - 1][1]))
    request_body(stream)
    rest = delta(1, "bc", 2) + delta(2, "d", 1)
    reported = stream.take(delta(0, "a", 1) + rest + ids(1, 2, 3, 4))
    assert reported == {1: rest, 2: b"", 3: delta(2, "d", 1)}[known]
    assert stream.possible == possible


def test_a_replayed_response_ends_when_its_tokens_differ() -> None:
    stream = ReplayedResponse.of({}, 5)
    request_body(stream)
    stream.take(b"".join(WHOLE[:2]))
    request_body(stream)
    assert stream.take(WHOLE[0].replace(b"[1,2]", b"[1,3]") + WHOLE[1]) == b""
    assert (stream.differs, stream.possible) == (True, False)
