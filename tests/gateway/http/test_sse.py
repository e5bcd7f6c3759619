"""Whole events, whatever the pieces."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_gateway.http.sse import (
    LONG_EVENTS_BYTES,
    LONGEST_EVENT_BYTES,
    SHORT_EVENT_BYTES,
    EventSplitter,
    has_error,
    without_comments,
)

EVENT = st.sampled_from(
    [b"data: {}\n\n", b"data: a\r\n\r\n", b"data: b\r\r", b": ping\n\n", b"event: x\ndata: 1\ndata: 2\n\n", b"\n\n"]
)


@given(
    st.lists(EVENT), st.binary(max_size=5).filter(lambda rest: b"\n" not in rest and b"\r" not in rest), st.integers()
)
def test_event_splitter_keeps_all_bytes_and_ends_each_piece_at_an_event(
    events: list[bytes], rest: bytes, seed: int
) -> None:
    random, splitter, stream, out = Random(seed), EventSplitter(), b"".join(events) + rest, b""
    while stream:
        size = random.randint(1, 12)
        piece = splitter.feed(stream[:size])
        assert piece.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) or not piece
        out, stream = out + piece, stream[size:]
    assert out + splitter.rest() == b"".join(events) + rest
    assert splitter.rest().endswith(rest)


def test_event_splitter_passes_bytes_on_when_they_are_no_event_stream() -> None:
    splitter = EventSplitter()
    piece = b"x" * (LONGEST_EVENT_BYTES + 1)
    assert splitter.feed(piece) == piece


def test_streams_buffer_a_bounded_amount_when_none_of_their_events_ends() -> None:
    piece = b"x" * (1 << 20)
    splitters = [EventSplitter() for _ in range(40)]
    for splitter in splitters:
        for _ in range(3):
            splitter.feed(piece)
    assert sum(len(splitter.rest()) for splitter in splitters) <= LONG_EVENTS_BYTES + 40 * SHORT_EVENT_BYTES
    lone = splitters[0]
    del splitter, splitters
    lone.feed(b"\n\n")
    assert EventSplitter._buffered_bytes == 0
    assert lone.feed(piece) == b"", "there is room again"
    assert lone.feed(b"\n\n") == piece + b"\n\n"


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (b'data: {"error":{"message":"x"}}\n\n', True),
        (b'data: {"choices":[]}\n\ndata: {"error": {}}\n\n', True),
        (b'data: {"choices":[{"text":"data: {\\"error\\""}]}\n\n', False),
        (b'data: {"choices":[],"error":null}\n\n', False),
        (b'event: error\ndata: {"type":"error"}\n\n', True),
    ],
)
def test_errors_are_detected_in_sse_events(events: bytes, error: bool) -> None:
    assert has_error(events) == error


@pytest.mark.parametrize(
    ("events", "rest"),
    [
        (b": waiting\n\n", b""),
        (b": waiting\n\n: waiting\r\n\r\ndata: 1\n\n: later\n\n", b"data: 1\n\n: later\n\n"),
        (b": one\n:\n\ndata: 1\n\n", b"data: 1\n\n"),
        (b": of an event\ndata: 1\n\n", b": of an event\ndata: 1\n\n"),
        (b"data: 1\n\n", b"data: 1\n\n"),
        (b"", b""),
    ],
)
def test_sse_comments_are_removed_before_the_first_event(events: bytes, rest: bytes) -> None:
    assert without_comments(events) == rest
