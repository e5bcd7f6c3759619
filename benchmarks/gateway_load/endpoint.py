"""An OpenAI server that thinks of nothing, in a process of its own: `python endpoint.py PORT MODEL [ASSETS.json]`.

A request with `"stream":true` gets CHUNKS events, INTERVAL_S apart, with token ids if it asks for them, as ours does of
engines of ours; any other a small answer. It serves prompt assets from a file, so that a gateway tokenises as it would
for an engine.
"""

import asyncio
import json
import sys
from pathlib import Path

import uvloop

CHUNKS, INTERVAL_S = 64, 0.005
ANSWER = json.dumps({"id": "x", "object": "chat.completion", "choices": [{"message": {"content": "y" * 300}}]}).encode()
CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1780000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null%b}]}\n\n'
)
"""To be completed by its token ids."""
TOKEN_IDS = b',"token_ids":[1234]'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    """A response."""
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


class Server(asyncio.Protocol):
    """One connection."""

    model = "m"
    assets = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self.received[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.received) < end + 4 + length:
                return
            body = self.received[end + 4 : end + 4 + length]
            del self.received[: end + 4 + length]
            ids = TOKEN_IDS if b'"return_token_ids":true' in body else b""
            self.answer(head.split(b" ", 2)[1], CHUNK % ids if b'"stream":true' in body else b"")

    def answer(self, path: bytes, event: bytes) -> None:
        """One request was read; `event`: of the stream that it asks for."""
        if path == b"/v1/models":
            models = {"object": "list", "data": [{"id": self.model, "object": "model", "max_model_len": 1 << 20}]}
            self.transport.write(whole(json.dumps(models).encode()))
        elif path == b"/prompt_assets":
            self.transport.write(whole(self.assets) if self.assets else whole(b"{}", b"404 Not Found"))
        elif path.startswith((b"/get_", b"/server_info", b"/model_info")):
            self.transport.write(
                whole(json.dumps({"model_path": self.model, "served_model_name": self.model}).encode())
            )
        elif path == b"/kv_snapshot":
            self.transport.write(whole(b"{}", b"404 Not Found"))
        elif event:
            self.transport.write(STREAM)
            self.chunk(b"%x\r\n%s\r\n" % (len(event), event), CHUNKS)
        else:
            self.transport.write(whole(ANSWER))

    def chunk(self, chunk: bytes, left: int) -> None:
        """The next one, and a timer for the one after it."""
        if self.transport.is_closing():
            return
        self.transport.write(chunk)
        if left == 1:
            self.transport.write(b"0\r\n\r\n")
        else:
            asyncio.get_running_loop().call_later(INTERVAL_S, self.chunk, chunk, left - 1)


async def main(port: int) -> None:
    """Serves until it is killed."""
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    Server.model = sys.argv[2]
    Server.assets = Path(sys.argv[3]).read_bytes() if len(sys.argv) > 3 else b""
    uvloop.run(main(int(sys.argv[1])))
