"""Runs the HTTP process: start, serve, drain, exit. It knows neither routes nor flags."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI

from mini_infer_contract.launch import DRAINING_HEADER
from mini_infer_engine.api.admin_guard import AdminGuard
from mini_infer_engine.api.app import make_admin_app, make_app
from mini_infer_engine.api.metrics import ServerMetrics
from mini_infer_engine.api.state import ApiServerState
from mini_infer_engine.config.options.server_options import ServerOptions
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.peer_ports import PeerPorts
from mini_infer_engine.core.scheduling.from_options import default_targets
from mini_infer_engine.core_process.child_process import CoreProcess
from mini_infer_engine.core_process.publisher import PortInUseError
from mini_infer_engine.server.core_client import CoreClient, CoreFailedError
from mini_infer_engine.server.lines import connect
from mini_infer_engine.server.throughput import Throughput
from mini_infer_engine.text.text_model import TextModel
from mini_infer_process.event_loop import loop_factory
from mini_infer_process.interpreter import favour_event_loop
from mini_infer_process.listening import is_loopback
from mini_infer_process.open_files import raise_open_file_limit
from mini_infer_web.api_errors import ApiError
from mini_infer_web.api_keys import ApiKeys
from mini_infer_web.http_server.connection import limited
from mini_infer_web.http_server.hosts import allowed_hosts
from mini_infer_web.http_server.server import LimitedServer, connections_for, server_config
from mini_infer_web.tls import ServerTls

logger = logging.getLogger(__name__)

_THROUGHPUT_INTERVAL_S = 10.0
_DEAD_CORE_LINGER_S = 0.5
"""Seconds for which /healthz reports a dead core before the process exits: frequent probes get the reason there, others
from their own error and from the log. If it were longer, a group of ranks would not end within five seconds.
"""
_KEEP_ALIVE_S = 75
"""Seconds until an idle connection is closed: longer than clients and gateways keep one, so that the server is not the
side that closes first.
"""


def serve(
    listening: socket.socket,
    text: TextModel,
    cores: Sequence[CoreProcess],
    options: ServerOptions,
    settings: EngineSettings,
    keys: ApiKeys,
    tls: ServerTls | None,
    peers: PeerPorts,
    admin: socket.socket | None = None,
) -> str:
    """Runs until a signal or a core's failure. Returns the reason of a failure in one line, for the caller to log last.

    The reason is empty after a normal end.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            return runner.run(_Server(listening, text, cores, options, settings, keys, tls, peers, admin).run())
        except PortInUseError as error:
            return str(error)


class _Uvicorn(LimitedServer):
    """An HTTP server without signal handlers: `_Server` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(
        self,
        listening: socket.socket,
        text: TextModel,
        cores: Sequence[CoreProcess],
        options: ServerOptions,
        settings: EngineSettings,
        keys: ApiKeys,
        tls: ServerTls | None,
        peers: PeerPorts,
        admin: socket.socket | None,
    ) -> None:
        self._listening = listening
        self._text = text
        self._cores = cores
        self._options = options
        self._settings = settings
        self._keys, self._tls, self._peers = keys, tls, peers
        self._admin = admin
        self._failure = ""
        """The reason why the process ends, in one line; empty if nothing has failed."""
        self._leaving = asyncio.Event()
        """Set when the process should exit at once."""
        self._drain: asyncio.Task[None] | None = None
        self._terminated = False

    async def run(self) -> str:
        """Serves until a signal or a core's failure. Returns the reason of the failure, or an empty string."""
        metrics = ServerMetrics(self._text.names[0], len(self._cores))
        lines = connect(self._cores, metrics, self._options, self._settings, self._peers)
        max_running = self._settings.max_num_seqs * len(self._cores)
        self._text.grammars.start()
        self._state = ApiServerState(self._text, lines.core, metrics, self._options, max_running)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_terminate)
        loop.add_signal_handler(signal.SIGINT, self._leaving.set)
        self._state.peer_secret = self._peers.secret
        self._state.default_targets = default_targets(self._settings)
        guard = AdminGuard(self._peers.secret, self._keys, events_are_open=not is_loopback(self._peers.host))
        app = make_app(self._state, self._keys, guard)
        server = _Uvicorn(_uvicorn_config(app, self._options, has_keys=bool(self._keys)), self._tls)
        favour_event_loop()
        serving = asyncio.create_task(server.serve([self._listening]))
        owned = [
            *(asyncio.create_task(self._watch(core, line)) for core, line in zip(self._cores, lines.all, strict=True)),
            asyncio.create_task(self._log_throughput(metrics)),
        ]
        if self._admin is not None:
            # A Unix socket has no name that a page could rebind: its clients may say any host, as with keys.
            admin = _Uvicorn(_uvicorn_config(make_admin_app(self._state), self._options, has_keys=True), None)
            owned.append(asyncio.create_task(admin.serve([self._admin])))
        await asyncio.wait([serving, asyncio.create_task(self._leaving.wait())], return_when=asyncio.FIRST_COMPLETED)
        for task in owned:
            task.cancel()
        for core, line in zip(self._cores, lines.all, strict=True):
            if core.status() is None:  # else closing the line would wait for somebody to take it
                line.stop()
            if line.failure is None:
                line.fail(ApiError(503, "the server is stopping", code="stopping", headers={DRAINING_HEADER: "true"}))
        server.should_exit = True
        await serving
        lines.close()
        return self._failure

    def _on_terminate(self) -> None:
        """Handles SIGTERM: begins to drain, within the drain's time-out. A second signal ends the process at once."""
        if self._terminated:
            self._leaving.set()
            return
        self._terminated = True
        self._start_drain()

    def _start_drain(self) -> None:
        self._state.start_drain()
        if self._drain is None:
            self._drain = asyncio.create_task(self._finish_requests())

    async def _finish_requests(self) -> None:
        logger.info("draining: %d requests are running", self._state.in_flight)
        try:
            await asyncio.wait_for(self._state.idle.wait(), self._options.drain_timeout_s)
        except TimeoutError:
            logger.warning("leaving with %d requests unfinished after the drain timeout", self._state.in_flight)
        self._leaving.set()

    async def _watch(self, core: CoreProcess, client: CoreClient) -> None:
        """Receives messages while the core runs. After its end it fails the requests that wait for it, and ends the
        server.

        If other cores have work, they finish it first, and requests that arrive meanwhile are refused.
        """
        ended = core.watch()
        receiving = asyncio.create_task(client.receive())
        try:
            waited: list[asyncio.Future[Any]] = [ended, receiving]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            exit_reason = core.exit_reason.read()
            if not exit_reason and not receiving.done():
                # They may still be in the socket.
                await asyncio.wait([receiving], timeout=0.2)
            reason = exit_reason or (f"it ended with status {ended.result()}" if ended.done() else "it broke off")
            if receiving.done() and isinstance(error := receiving.exception(), Exception):
                reason = str(error) if isinstance(error, CoreFailedError) else f"{type(error).__name__}: {error}"
        finally:
            receiving.cancel()
        which = f"engine {client.engine}: " if len(self._cores) > 1 else ""
        message = f"{which}{reason if client.model is None else f'the core process has failed: {reason}'}"
        self._failure = self._failure or " ".join(message.split())
        client.fail(ApiError(503, f"the engine's core process has failed: {reason}", code="engine_dead"))
        if client.model is None:
            self._leaving.set()
            return
        logger.error("%s", message)
        if len(self._cores) > 1:
            self._state.start_drain()
        await asyncio.sleep(_DEAD_CORE_LINGER_S)
        if len(self._cores) > 1:
            self._start_drain()
        else:
            self._leaving.set()

    async def _log_throughput(self, metrics: ServerMetrics) -> None:
        """Logs a line every ten seconds while there is work."""
        throughput = Throughput()
        while True:
            await asyncio.sleep(_THROUGHPUT_INTERVAL_S)
            line = throughput.line(metrics.stats, metrics.generation_tokens, _THROUGHPUT_INTERVAL_S)
            if line:
                logger.info(line)


def _uvicorn_config(app: FastAPI, options: ServerOptions, *, has_keys: bool) -> uvicorn.Config:
    limits = options.connections
    most = connections_for(raise_open_file_limit(), limits.max_connections)
    hosts = allowed_hosts(options.allowed_hosts, options.host, has_keys=has_keys, origins=options.allowed_origins)
    return server_config(
        app,
        limited(replace(limits, max_connections=most), hosts),
        options.max_body_bytes,
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
