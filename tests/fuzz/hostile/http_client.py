"""Plays fuzzed requests against a server over raw sockets, and tells what came back."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field

from tests.fuzz.hostile.http_grammar import FuzzedRequest, Manner, fuzzed_request

PIECE_BYTES = 512
READ_AHEAD_BYTES = 1 << 15
"""Of a body: a server that refuses one by its head may not have read what is above."""
SLOW_PIECE_BYTES, SLOW_PAUSE_S, SLOW_PIECES = 64, 0.02, 20


@dataclass(slots=True)
class Findings:
    """Of a run."""

    statuses: Counter[str] = field(default_factory=Counter)
    """By status, or "left" where the client left before one came."""
    manners: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """What must not be: a 5xx, a hang, an answer without a head."""


async def play(host: str, port: int, request: FuzzedRequest, limit_s: float) -> str:
    """Status of the answer, "left", "refused early" or "no answer". TimeoutError: it did not end in time."""
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        try:
            return await _exchange(reader, writer, request)
        except ConnectionError:
            # Closed with a part of the body unread, which may overtake the answer (RFC 9112, 9.6).
            return "refused early" if len(request.body) > READ_AHEAD_BYTES else "no answer"
        finally:
            writer.transport.abort()


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: FuzzedRequest) -> str:
    wire, manner = request.wire, request.manner
    if manner in (Manner.CUT_REQUEST, Manner.CUT_CHUNKED):
        writer.write(wire[: int(len(wire) * request.amount)])
        await writer.drain()
        return "left"
    writer.write(wire)
    with contextlib.suppress(ConnectionError):  # It may have refused the body already.
        await writer.drain()
        if manner is Manner.HALF_CLOSED:
            writer.write_eof()
    pieces = int(request.amount * 8) if manner is Manner.CUT_ANSWER else SLOW_PIECES
    answer = b""
    while True:
        if manner is Manner.SLOW_READER:
            await asyncio.sleep(SLOW_PAUSE_S)
        if manner in (Manner.CUT_ANSWER, Manner.SLOW_READER):
            if not pieces:
                return _status(answer) or "left"
            pieces -= 1
        piece = await reader.read(SLOW_PIECE_BYTES if manner is Manner.SLOW_READER else PIECE_BYTES)
        if not piece:
            return _status(answer) or ("left" if manner is Manner.HALF_CLOSED else "no answer")
        answer = answer + piece if len(answer) < PIECE_BYTES else answer


def _status(answer: bytes) -> str:
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") and len(answer) >= 12 else ""


async def run(
    host: str, port: int, model: str, seed: int, first: int, count: int, clients: int, limit_s: float
) -> Findings:
    """Requests `first` up to `first + count` of a seed, by so many clients at once."""
    findings, numbers = Findings(), iter(range(first, first + count))

    async def client() -> None:
        for index in numbers:
            request = fuzzed_request(seed, index, model)
            findings.manners[request.manner.name] += 1
            try:
                answered = await play(host, port, request, limit_s)
            except TimeoutError:
                answered = "hang"
            findings.statuses[answered] += 1
            if answered.startswith("5") or answered in ("hang", "no answer"):
                findings.wrong.append(
                    f"{answered}: seed {seed} number {index}, {request.manner.value}: {request.wire[:300]!r}"
                )

    await asyncio.gather(*(client() for _ in range(clients)))
    return findings
