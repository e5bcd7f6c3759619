"""What the state of a stream takes, whatever its engine sends."""

import pytest

from mini_infer_gateway.http.upstream import BrokenConnectionError
from mini_infer_gateway.pipeline.continuation.base import Continuation
from mini_infer_gateway.pipeline.continuation.buffered import LONGEST_STEP_BYTES
from mini_infer_gateway.pipeline.continuation.messages import MessageContinuation
from mini_infer_gateway.pipeline.continuation.replayed import ReplayedContinuation
from mini_infer_gateway.pipeline.continuation.responses import ReplayedResponse, ResponseContinuation

CHUNK = (
    b'data: {"choices":[{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null,"token_ids":[%b]}]}\n\n'
)
PING = b'event: ping\ndata: {"type":"ping","token_ids":[%b]}\n\n'
IDS = b'event: token_ids\ndata: {"type":"token_ids","token_ids":[%b]}\n\n'
MANY = b",".join([b"123456"] * 1000)
STEPS = 2000


def counted(continuation: Continuation, limit_bytes: int = 1 << 20) -> list[int]:
    reserved: list[int] = []

    def reserve(more_bytes: int) -> bool:
        if sum(reserved) + more_bytes > limit_bytes:
            return False
        reserved.append(more_bytes)
        return True

    continuation.reserve = reserve
    return reserved


@pytest.mark.parametrize(
    ("kind", "event"),
    [(Continuation, CHUNK), (MessageContinuation, PING), (ResponseContinuation, IDS)],
)
def test_a_stream_goes_on_without_its_ids_when_there_is_no_memory_for_them(
    kind: type[Continuation], event: bytes
) -> None:
    stream = kind.of({}, 1)
    reserved = counted(stream)
    sent = [stream.take(event % MANY) for _ in range(STEPS)]
    assert not stream.possible
    assert sum(reserved) <= 1 << 20
    assert sum(map(len, stream._ids)) <= 1 << 20
    assert stream.tokens == STEPS * 1000
    assert len(set(sent)) == 1
    assert b"123456" not in sent[0]


@pytest.mark.parametrize(("kind", "event"), [(ReplayedContinuation, CHUNK), (ReplayedResponse, IDS)])
def test_a_stream_that_can_only_be_replayed_breaks_off_when_there_is_no_memory_for_it(
    kind: type[Continuation], event: bytes
) -> None:
    stream = kind.of({}, 1)
    counted(stream)
    with pytest.raises(BrokenConnectionError):
        list(map(stream.take, [event % MANY] * STEPS))
    assert stream.tokens <= 100_000


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        (MessageContinuation, b"event: content_block_delta\ndata: %b\n\n"),
        (ResponseContinuation, b"event: response.output_text.delta\ndata: %b\n\n"),
    ],
)
def test_events_are_sent_on_when_their_token_ids_do_not_come(kind: type[Continuation], event: bytes) -> None:
    stream, one = kind.of({}, 1), event % (b"x" * (1 << 20))
    sent = b"".join(stream.take(one) for _ in range(8))
    assert sent == one * 8
    assert not stream.possible
    assert len(sent) > LONGEST_STEP_BYTES
    assert stream.take(event % b"y") == event % b"y"
