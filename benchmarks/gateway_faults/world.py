"""What is disturbed: dry-run engines, gateways over an endpoints file, and a server that misbehaves on purpose.

All on loopback, each a process of its own, except for the misbehaving one and the pipe in front of an event socket.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

MODEL = "dry"
STEP_MS = 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A process of ours on ports that stay the same when it is started again."""

    name: str
    module: str
    flags: list[str]
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Its base."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Starts it, also again, and waits until it is ready."""
        command = [sys.executable, "-m", self.module, "--host", "127.0.0.1", "--port", str(self.port), *self.flags]
        null = asyncio.subprocess.DEVNULL
        self.process = await asyncio.create_subprocess_exec(*command, stdout=null, stderr=null)
        await self.ready()

    async def ready(self, limit_s: float = 60.0) -> None:
        """Waits until it says so."""
        async with asyncio.timeout(limit_s), aiohttp.ClientSession() as client:
            while True:
                try:
                    async with client.get(self.url + "/readyz") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)

    def signal(self, number: int) -> None:
        """Sends a signal if it still runs."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)

    @property
    def core_pid(self) -> int:
        """Of an engine's second process."""
        assert self.process is not None
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    async def kill(self) -> None:
        """SIGKILL, also to one that is stopped."""
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            await self.process.wait()


class Engine(Server):
    """A dry-run engine; the gateway reads its events through `pipe`."""

    def __init__(self, name: str) -> None:
        self.events_port, self.replay_port = free_port(), free_port()
        flags = ["--dry-run", "--dry-run-step-ms", str(STEP_MS), "--served-model-name", MODEL, "--log-level", "error"]
        sockets = ["--events-port", str(self.events_port), "--replay-port", str(self.replay_port)]
        super().__init__(name, "mini_infer_engine.server.cli", [*flags, *sockets])
        self.pipe = Pipe(self.events_port)

    def kill_core(self) -> None:
        """SIGKILL to the second process alone."""
        os.kill(self.core_pid, signal.SIGKILL)

    @property
    def endpoint(self) -> dict[str, str]:
        """As the endpoints file has it."""
        replay = f"tcp://127.0.0.1:{self.replay_port}"
        events = f"tcp://127.0.0.1:{self.pipe.port}"
        return {"name": self.name, "url": self.url, "model": MODEL, "events": events, "replay": replay}


class Pipe:
    """Forwards TCP to a port until it is cut."""

    def __init__(self, target: int) -> None:
        self.port, self._target = free_port(), target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Listens, also again."""
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", self.port)

    async def cut(self) -> None:
        """Breaks all connections and listens no more."""
        if self._server:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back}

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
            except OSError:
                pass
            finally:
                target.close()

        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)
        self._writers -= {writer, back}


class Misbehaving:
    """Listens as an engine does and answers every POST with one status, or with nothing (0)."""

    def __init__(self, status: int) -> None:
        self.status, self.port, self.num_requests = status, free_port(), 0
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> dict[str, str]:
        """As the endpoints file has it."""
        return {"name": "odd", "url": f"http://127.0.0.1:{self.port}", "model": MODEL}

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)

    def stop(self) -> None:
        """Listens no more."""
        if self._server:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
                )
                await reader.readexactly(length)
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                self.num_requests += 1
                if self.status == 0:
                    await asyncio.sleep(3600)
                body = json.dumps({"error": {"message": f"status {self.status}"}}).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (self.status, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # The client went, or all of it ends.
        finally:
            writer.close()


@dataclass
class World:
    """Two engines, one gateway and another one where asked for, and the file between them."""

    folder: Path
    engines: list[Engine] = field(default_factory=list)
    gateways: list[Server] = field(default_factory=list)

    @property
    def file(self) -> Path:
        """Where the gateways read who there is."""
        return self.folder / "endpoints.json"

    def write(self, *more: dict[str, str]) -> None:
        """The two engines and what is given beside them."""
        new = self.folder / "new.json"
        new.write_text(json.dumps({"endpoints": [*(engine.endpoint for engine in self.engines), *more]}))
        new.rename(self.file)

    async def start(self) -> None:
        """Two engines and a gateway, all ready."""
        self.engines = [Engine("a"), Engine("b")]
        for engine in self.engines:
            await engine.pipe.open()
        await asyncio.gather(*(engine.start() for engine in self.engines))
        self.write()
        await self.add_gateway()

    async def add_gateway(self) -> Server:
        """One more, ready."""
        flags = ["--endpoints", str(self.file), "--routing-headers", "--log-level", "critical", "--drain", "3"]
        gateway = Server(f"gateway {len(self.gateways)}", "mini_infer_gateway", flags)
        await gateway.start()
        self.gateways.append(gateway)
        return gateway

    async def stop(self) -> None:
        """Ends everything."""
        for engine in self.engines:
            await engine.pipe.cut()
        await asyncio.gather(*(server.kill() for server in [*self.gateways, *self.engines]))
