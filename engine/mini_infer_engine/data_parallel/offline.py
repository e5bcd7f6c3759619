"""Runs several engines for a program without a server: core processes, with the interface of an engine
in this process.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack

import zmq
from msgspec.structs import replace

from mini_infer_contract.events import EVENTS_TOPIC, decode_batch
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.batch import RunnerLostError
from mini_infer_engine.core.request import Output, Request
from mini_infer_engine.core_process import messages
from mini_infer_engine.core_process.child_process import CoreProcess
from mini_infer_engine.core_process.core_config import CoreConfig
from mini_infer_engine.data_parallel.model import model_of_all
from mini_infer_engine.data_parallel.processes import core_processes
from mini_infer_engine.data_parallel.router import EngineRouter
from mini_infer_engine.dry.dry_run import DryRun
from mini_infer_process import zmq_limits

_LOOK_S = 0.5
"""Seconds between two checks for ended processes, while none sends a message."""


class OfflineEngines:
    """Offers the interface of `core.engine.Engine` for adding requests and stepping. Not thread-safe."""

    def __init__(self, settings: EngineSettings, dry_run: DryRun | None) -> None:
        """Starts the engines, and waits until all are ready. Raises ValueError with the reason if the model or the
        settings are at fault.
        """
        stack = ExitStack()
        self._close = weakref.finalize(self, stack.close)
        config = CoreConfig(
            settings=settings,
            dry_run=dry_run,
            events_port=0,
            replay_port=0,
            log_level="warning",
            log_format="text",
        )
        self._cores = stack.enter_context(core_processes(config))
        context = zmq.Context()
        stack.callback(context.destroy, linger=200)
        self._poller = zmq.Poller()
        self._sockets = [_connect(context, core, self._poller) for core in self._cores]
        stack.callback(_stop, self._sockets)
        self._router = EngineRouter(len(self._cores), caches_prefixes=settings.enable_prefix_caching)
        self._outputs: list[Output] = []
        self._ready: dict[int, messages.ModelInfo] = {}
        self._failure: Exception | None = None
        try:
            while len(self._ready) < len(self._cores):
                self._receive()
        except BaseException:
            self.close()
            raise
        self.model = model_of_all([self._ready[engine] for engine in range(len(self._cores))])

    def close(self) -> None:
        """Ends all processes."""
        self._close()

    @property
    def has_work(self) -> bool:
        """True if a step may return outputs."""
        return self._router.has_work

    def add(self, request: Request) -> None:
        """Sends a request to one of the engines. Raises RunnerLostError if an engine has ended."""
        if self._failure is not None:
            raise self._failure
        engine = self._router.route(request, self.model.revision)
        assert engine is not None
        self._send(engine, messages.Add(replace(request, prompt_token_ids=list(request.prompt_token_ids))))

    def abort(self, request_id: str) -> None:
        """Aborts a request. Unknown ids are ignored."""
        engine = self._router.engine_of(request_id)
        if engine is not None and self._failure is None:
            self._router.ended([request_id])
            self._send(engine, messages.Abort([request_id]))

    def step(self) -> list[Output]:
        """Waits for outputs of any engine, and returns them. Raises RunnerLostError if an engine has ended."""
        if self._failure is not None:
            raise self._failure
        while self.has_work and not self._outputs:
            self._receive()
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            if output.finish_reason is None:
                self._router.record_output(output.request_id, len(output.token_ids))
            else:
                self._router.ended([output.request_id])
        return outputs

    def _send(self, engine: int, message: messages.ApiServerMessage) -> None:
        self._sockets[engine].send(messages.encode(message))

    def _receive(self) -> None:
        """Waits for messages, and handles them. Raises an error if a process has ended."""
        ready = dict(self._poller.poll(int(_LOOK_S * 1000)))
        for engine, socket in enumerate(self._sockets):
            while socket in ready:
                try:
                    self._take(engine, messages.decode_from_core(socket.recv(zmq.NOBLOCK)))
                except zmq.Again:
                    break
        for engine, core in enumerate(self._cores):
            if (status := core.status()) is not None:
                reason = core.exit_reason.read() or f"it ended with status {status}"
                self._lost(RunnerLostError(f"engine {engine}: the core process has failed: {reason}"))

    def _take(self, engine: int, message: messages.CoreMessage) -> None:
        match message:
            case messages.StepOutputs(outputs, _):
                self._outputs += outputs
            case messages.Published(topic, payload) if topic == EVENTS_TOPIC:
                self._router.apply(engine, decode_batch(payload).events)
            case messages.Ready(model):
                self._ready[engine] = model
            case messages.Failed(reason):
                is_ready = engine in self._ready
                self._lost(RunnerLostError(f"engine {engine}: {reason}") if is_ready else ValueError(reason))

    def _lost(self, error: Exception) -> None:
        """Ends all engines and raises the error: the requests of the ended engine are lost, and the caller waits for
        them.
        """
        self._failure = error
        self.close()
        raise error


def _connect(context: "zmq.Context[zmq.Socket[bytes]]", core: CoreProcess, poller: zmq.Poller) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    zmq_limits.LOCAL.apply(socket)
    socket.connect(core.address)
    socket.send(messages.encode(messages.Hello()))
    poller.register(socket, zmq.POLLIN)
    return socket


def _stop(sockets: "Sequence[zmq.Socket[bytes]]") -> None:
    for socket in sockets:
        socket.send(messages.encode(messages.Stop()))
