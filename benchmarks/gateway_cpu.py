"""What the gateway costs: CPU milliseconds a small request and microseconds a relayed chunk, beside the bare endpoint.

`python benchmarks/gateway_cpu.py [--requests N] [--chunks N]` starts a fake endpoint, the gateway in a process of its
own, and a client, all on loopback, and reads the gateway's CPU time from /proc (user and system, both counted). The
endpoint serves no prompt assets, so nothing is tokenised.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

ANSWER = json.dumps({"id": "x", "object": "chat.completion", "choices": [{"message": {"content": "y" * 300}}]}).encode()
CHUNK = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"delta":{"content":" token"}}]}\n\n'


async def endpoint(chunks: int, interval_s: float) -> int:
    """An OpenAI server that thinks of nothing: a small JSON answer, or `chunks` pieces one at a time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
                )
                body = await reader.readexactly(length)
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                elif b'"stream":true' in body:
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                    )
                    for _ in range(chunks):
                        writer.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
                        await asyncio.sleep(interval_s)
                    writer.write(b"0\r\n\r\n")
                else:
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
                        + ANSWER
                    )
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return int(server.sockets[0].getsockname()[1])


async def client(port: int, stream: bool, requests: int, connections: int, chunks: int) -> tuple[float, int]:
    """Sends `requests` over `connections`; returns seconds and chunks received."""
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "hello " * 20}], "stream": stream},
        separators=(",", ":"),
    ).encode()
    message = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    message = message % len(body) + body
    received = 0

    async def one(count: int) -> None:
        nonlocal received
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(count):
            writer.write(message)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200"), head
            if b"content-length" in head:
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                continue
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
                received += 1
            await reader.readline()
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(one(requests // connections) for _ in range(connections)))
    return time.perf_counter() - started, received


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def main() -> None:
    """Both measurements, printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--chunks", type=int, default=300)
    parser.add_argument("--streams", type=int, default=64)
    options = parser.parse_args()
    upstream = await endpoint(options.chunks, 0.005)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "endpoints.json"
        file.write_text(json.dumps({"endpoints": [{"name": "a", "url": f"http://127.0.0.1:{upstream}", "model": "m"}]}))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "mini_infer_gateway", "--port", str(port), "--endpoints", str(file)]
        gateway = await asyncio.create_subprocess_exec(*command, "--log-level", "warning")
        try:
            for _ in range(100):
                await asyncio.sleep(0.1)
                try:
                    await client(port, False, 200, 4, 0)
                    break
                except (OSError, AssertionError):
                    continue
            for name, stream, requests, connections in (
                ("request", False, options.requests, 16),
                ("stream", True, options.streams, options.streams),
            ):
                before = cpu_s(gateway.pid)
                seconds, _ = await client(port, stream, requests, connections, options.chunks)
                spent = cpu_s(gateway.pid) - before
                if stream:
                    sent = requests * options.chunks
                    print(f"{name}: {1e6 * spent / sent:.1f} us CPU a chunk, {sent} chunks in {seconds:.1f} s")
                else:
                    print(f"{name}: {1e3 * spent / requests:.3f} ms CPU a request, {requests / seconds:.0f} a second")
        finally:
            gateway.terminate()
            await gateway.wait()


if __name__ == "__main__":
    asyncio.run(main())
