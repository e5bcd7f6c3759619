"""Clients: raw HTTP/1.1 over asyncio streams, a closed loop over connections or an open loop at a rate."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    port: int
    path: str = "/v1/chat/completions"


@dataclass(frozen=True)
class Answer:
    """What came back; times from the moment at which the request should have gone out."""

    status: int
    first_byte_s: float
    total_s: float


class Connection:
    """One, reused; opened again where the server has closed it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, body: bytes, due_s: float | None = None) -> Answer:
        """Posts a chat, or GETs the list of models where the body is empty.

        A connection that its server closed while nobody used it is opened again.
        """
        due_s = time.perf_counter() if due_s is None else due_s
        if self._streams is not None:
            try:
                return await self._request(body, due_s)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.close()
                if getattr(error, "partial", b""):
                    raise
        return await self._request(body, due_s)

    async def _request(self, body: bytes, due_s: float) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._target.port, limit=1 << 20)
        reader, writer = self._streams
        writer.write(_message(self._target.path, body))
        head = await reader.readuntil(b"\r\n\r\n")
        status, headers = int(head[9:12]), head.lower()
        if b"\r\ncontent-length:" in headers:
            first_s = time.perf_counter() - due_s
            await reader.readexactly(int(headers.split(b"\r\ncontent-length:")[1].split(b"\r\n")[0]))
        else:
            first_s = 0.0
            while size := int(await reader.readline(), 16):
                first_s = first_s or time.perf_counter() - due_s
                await reader.readexactly(size + 2)
            await reader.readline()
        if b"\r\nconnection: close" in headers:
            self.close()
        return Answer(status, first_s, time.perf_counter() - due_s)

    def close(self) -> None:
        """Ends it."""
        if self._streams:
            self._streams[1].close()
            self._streams = None


def _message(path: str, body: bytes) -> bytes:
    if not body:
        return b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def request_once(target: Target, body: bytes) -> Answer:
    """One request on a connection of its own."""
    connection = Connection(target)
    try:
        return await connection.request(body)
    finally:
        connection.close()


async def closed_loop(target: Target, bodies: Sequence[bytes], connections: int) -> list[Answer]:
    """All bodies, each connection one after the other."""
    left = iter(bodies)

    async def work() -> list[Answer]:
        connection = Connection(target)
        answers = [await connection.request(body) for body in left]
        connection.close()
        return answers

    return [answer for answers in await asyncio.gather(*(work() for _ in range(connections))) for answer in answers]


async def open_loop(target: Target, bodies: Sequence[bytes], rate: float) -> list[Answer]:
    """A body every 1/rate seconds, whatever has been answered."""
    idle: list[Connection] = []
    began_s = time.perf_counter()

    async def one(body: bytes, due_s: float) -> Answer:
        connection = idle.pop() if idle else Connection(target)
        answer = await connection.request(body, due_s)
        idle.append(connection)
        return answer

    tasks = []
    for number, body in enumerate(bodies):
        due_s = began_s + number / rate
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(one(body, due_s)))
    answers = await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return answers


async def beside(disturb: Callable[[], Awaitable[object]], work: Awaitable[list[Answer]]) -> list[Answer]:
    """`work` while `disturb` is done again and again."""

    async def again() -> None:
        while True:
            await disturb()

    task = asyncio.create_task(again())
    try:
        return await work
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def chat(messages: Sequence[tuple[str, str]], stream: bool = False) -> bytes:
    """A body."""
    listed = [{"role": role, "content": content} for role, content in messages]
    return json.dumps({"model": "m", "messages": listed, "stream": stream}, separators=(",", ":")).encode()


def alternating(texts: Iterator[str]) -> list[tuple[str, str]]:
    """A chat of these texts."""
    return [("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]
