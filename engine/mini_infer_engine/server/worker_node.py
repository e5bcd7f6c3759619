"""Runs the ranks of a node that is not the first of a group, and answers health probes for them.

It serves no requests, but `/healthz` and `/readyz` for probes. It ends when one of its ranks or the group ends. SIGTERM
applies to the whole group: the node stays while the first node finishes running requests. It does not know who sends
SIGTERM to that node (LeaderWorkerSet's controller does, as soon as a worker is being deleted).
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from mini_infer_engine.config.options.settings import EngineSettings, master_address, num_nodes, ranks_per_node
from mini_infer_engine.distributed.rank_config import RankConfig, spawn_rank
from mini_infer_process.logs import LogFormat

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_BEHIND_S = 8.0
"""Seconds by which the first node may begin to drain later: its pod waits until gateways have removed it."""
_CONNECT_S = 2.0
_RETRY_S = 1.0
_LEAVE_S = 0.6
"""Seconds after the first node's end for ranks here to end by themselves; a hung rank does not."""
_REQUEST_S = 5.0
_ANSWERS = {"/healthz": b"200 OK", "/readyz": b"200 OK"}


class WorkerNode:
    """The ranks of one node."""

    def __init__(
        self,
        settings: EngineSettings,
        node: int,
        drain_timeout_s: float,
        log_level: str,
        log_format: LogFormat,
        peer_key: str = "",
    ) -> None:
        """Reads the group's address from the settings. Raises ValueError if there is none."""
        self._settings, self._node = settings, node
        self._host = master_address(settings)
        self._log_level, self._log_format, self._peer_key = log_level, log_format, peer_key
        self._drain_timeout_s = drain_timeout_s
        self._leaves_at_s = float("inf")
        self._is_notified = False

    def run(self, listening: socket.socket) -> int:
        """Runs until the group ends, or its time after a signal is over. Returns the exit status."""
        local = ranks_per_node(self._settings)
        ranks = range(self._node * local, (self._node + 1) * local)
        host, port = listening.getsockname()[:2]
        logger.info(
            "node %d of %d: ranks %d to %d of the group at %s:%d; health at http://%s:%d",
            self._node,
            num_nodes(self._settings),
            ranks[0],
            ranks[-1],
            self._host,
            self._settings.master_port,
            host,
            port,
        )
        with tempfile.TemporaryDirectory(prefix="mini-infer-ranks-") as folder:
            processes = {rank: spawn_rank(self._config(rank, index), Path(folder)) for index, rank in enumerate(ranks)}
            try:
                return asyncio.run(self._watch(listening, processes))
            finally:
                for process in processes.values():
                    process.kill()
                    process.wait()

    def _config(self, rank: int, local_rank: int) -> RankConfig:
        return RankConfig(
            settings=self._settings,
            rank=rank,
            local_rank=local_rank,
            store_host=self._host,
            store_port=self._settings.master_port,
            parent_pid=os.getpid(),
            kills_parent=False,
            peer_key=self._peer_key,
            log_level=self._log_level,
            log_format=self._log_format,
        )

    async def _watch(self, listening: socket.socket, processes: dict[int, "subprocess.Popen[bytes]"]) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        loop.add_signal_handler(signal.SIGINT, self._leave)
        server = await asyncio.start_server(_answer, sock=listening)
        first_has_ended = asyncio.create_task(self._first_ends())
        async with server:
            while time.monotonic() < self._leaves_at_s:
                for rank, process in processes.items():
                    if (status := process.poll()) is not None:
                        if status:
                            logger.error("rank %d ended with status %d: this node leaves the group", rank, status)
                        return int(status != 0)
                if first_has_ended.done():
                    logger.error("the first rank hangs or has ended: this node leaves the group, with ranks that run")
                    return 1
                if self._is_notified:
                    self._is_notified = False
                    if not await self._first_answers():
                        return 0
                await asyncio.sleep(_LOOK_S)
        return 0

    def _on_terminate(self) -> None:
        """Handles SIGTERM: the node stays while the first node drains. A second signal ends it at once."""
        if self._leaves_at_s < float("inf"):
            self._leave()
            return
        self._is_notified = True
        self._leaves_at_s = time.monotonic() + self._drain_timeout_s + _BEHIND_S
        logger.info("SIGTERM received: stays until the first machine has finished what runs")

    def _leave(self) -> None:
        self._leaves_at_s = 0.0

    async def _first_ends(self) -> None:
        """Waits until the group has connected and ended: the kernel closes the connection when the first rank's process
        ends.
        """
        while True:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._settings.master_port)
                break
            except OSError:
                await asyncio.sleep(_RETRY_S)
        try:
            await reader.read()
        except OSError:
            pass  # reset: it has ended, too
        finally:
            writer.close()
        await asyncio.sleep(_LEAVE_S)

    async def _first_answers(self) -> bool:
        """Returns True if the first node accepts connections. Otherwise there is no group to stay for: the first node
        never came, or is gone.
        """
        try:
            connecting = asyncio.open_connection(self._host, self._settings.master_port)
            _, writer = await asyncio.wait_for(connecting, _CONNECT_S)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one request of a probe, and closes the connection."""
    try:
        request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_S)
        path = request.split(b" ", 2)[1].decode("latin-1").partition("?")[0]
        status = _ANSWERS.get(path, b"404 Not Found")
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
    except (TimeoutError, OSError, IndexError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # a probe that says nothing gets no answer
    finally:
        writer.close()
