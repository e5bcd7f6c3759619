"""Whole responses, as they are handed to the server."""

import pytest

from mini_infer_gateway.http.asgi import send_whole
from mini_infer_web.asgi import PIECE_BYTES, Message


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
async def test_a_response_is_written_in_pieces_when_it_is_long(size: int) -> None:
    body, sent = b"x" * size, list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    await send_whole(send, 200, [(b"content-length", b"%d" % size)], body)
    start, *pieces = sent
    assert start["status"] == 200
    assert b"".join(piece["body"] for piece in pieces) == body
    assert max(len(piece["body"]) for piece in pieces) <= PIECE_BYTES
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
