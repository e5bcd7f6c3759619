"""Runs the core process: schedules, runs, commits and publishes in a loop. It knows neither HTTP nor text.

build.py creates its engine. Between steps it handles the HTTP process's messages without waiting; with nothing to do it
sleeps in poll.
"""

import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from mini_infer_contract.events import Snapshot
from mini_infer_contract.events import encode as encode_event
from mini_infer_engine.config.options.settings import num_ranks
from mini_infer_engine.core.batch import RunnerLostError
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Output
from mini_infer_engine.core.stats import EngineStats
from mini_infer_engine.core_process import messages
from mini_infer_engine.core_process.build import BuiltEngine, BuiltPoolingEngine, build_engine
from mini_infer_engine.core_process.core_config import CoreConfig
from mini_infer_engine.core_process.prefetch import begin_prefetch
from mini_infer_engine.core_process.publisher import EventPublisher
from mini_infer_engine.core_process.warm_up import WarmUp
from mini_infer_engine.distributed.exit_reason import write_reason
from mini_infer_process import zmq_limits
from mini_infer_process.anonymous_memory import AnonymousMemory
from mini_infer_process.curve import PeerAuthenticator
from mini_infer_process.heap import HeapTrimmer
from mini_infer_process.interpreter import import_permanently, quick_switches
from mini_infer_process.logs import configure_logging, show_crashes

if TYPE_CHECKING:
    from mini_infer_engine.distributed.parallel_runner import Watched
    from mini_infer_engine.kv_transfer.worker import TransferWorker
    from mini_infer_engine.pooling.engine import PoolingEngine

logger = logging.getLogger(__name__)

_PARENT_CHECK_S = 1.0
_WRITE_BEHIND_S = 0.002
"""Seconds between two looks at copies to lower tiers, while there is no other work."""
_LINGER_MS = 500
"""Milliseconds for the last messages to the HTTP process."""
_HEARTBEAT_S = 5.0
"""Seconds between two messages of a core that waits: it has work, but needs pages that are blocked until another engine
settles its transfers. They show that it does not hang.
"""
_LOST_S = 0.5
"""Seconds from the end of a group of ranks until this process is ended, if it does not end by itself. The reason has
been written already, and the detection of a hung rank has taken three of the five seconds within which everything has
to end (see `heartbeats`).
"""
_SWITCH_S = 0.0005
"""Seconds that the core's thread and threads of transfers wait for each other's interpreter lock. Python's default of 5
ms is longer than a step.
"""
_PR_SET_PDEATHSIG = 1
"""Option of prctl (<sys/prctl.h>) for the signal that the kernel sends when the parent dies."""


class CoreLoop:
    """Connects the sockets and the engine."""

    def __init__(
        self,
        engine: "Engine | PoolingEngine",
        router: zmq.Socket[bytes],
        publisher: EventPublisher,
        parent_pid: int,
        api_server: bytes,
        transfer: "TransferWorker | None",
        role: str,
        weights_sent_bytes: Callable[[], int] = lambda: 0,
        warm_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._warm_up = WarmUp(warm_up)
        self._weights_sent_bytes = weights_sent_bytes
        self._router = router
        self._publisher = publisher
        self._parent_pid = parent_pid
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._transfer = transfer
        if transfer is not None:
            self._poller.register(transfer.core_woken, zmq.POLLIN)
        self._heap = HeapTrimmer()
        self._memory = AnonymousMemory((os.getpid(), parent_pid))
        self._polls_replays = False
        self._writes_behind = False
        """True if the engine, which has no work, copies cached blocks to lower tiers."""
        self._refused: list[Output] = []
        self._stopping = False
        self._api_server = api_server
        """Identity of the HTTP process at the ROUTER socket."""
        self._sent_stats = EngineStats()
        self._sent_s = 0.0
        self._role = role

    def run(self) -> None:
        """Runs until the HTTP process sends `Stop`, or the parent process is gone."""
        while not self._stopping:
            self._receive()
            if self._engine.has_work:
                outputs = self._engine.step()
            else:
                outputs, self._writes_behind = [], self._engine.write_behind()
            if self._refused:
                outputs, self._refused = [*self._refused, *outputs], []
            self._send(outputs)
            now = time.time()
            self._publisher.publish_events(self._engine.take_events(), now)
            if self._publisher.load_is_due(now):
                load = self._engine.load()
                accepted = messages.client_ids(load.accepted)
                facts = {"accepted": accepted, "role": self._role, "memory_bytes": self._memory.bytes_at(now)}
                self._publisher.publish_load(msgspec.structs.replace(load, **facts), now)
            self._warm_up.run(time.monotonic(), is_idle=not self._engine.has_work)

    def _receive(self) -> None:
        is_idle = False
        if not self._engine.has_work or self._engine.only_receives:
            self._poll_replays(self._publisher.accepts_replays())
            wait_s = min(_PARENT_CHECK_S, self._publisher.load_wait_s(time.time()), self._publisher.replay_wait_s())
            if self._writes_behind:
                wait_s = min(wait_s, _WRITE_BEHIND_S)
            wait_s = min(wait_s, self._engine.next_due_s - time.monotonic())
            if not self._warm_up.is_over:
                wait_s = 0.0
            is_idle = not self._poller.poll(max(1, int(wait_s * 1000)))
        self._heap.trim_if_due(time.monotonic(), is_idle=is_idle)
        if self._transfer is not None:
            self._transfer.drain_wakes()
        if os.getppid() != self._parent_pid:
            self._stopping = True
        while True:
            try:
                _, payload = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._handle(messages.decode_from_api_server(payload))
        self._publisher.answer_replays()

    def _poll_replays(self, enabled: bool) -> None:
        """Polls the socket for replay requests, or stops polling it if they have used up their allowance: the loop
        would spin.
        """
        if self._publisher.replay is None or enabled == self._polls_replays:
            return
        self._polls_replays = enabled
        if enabled:
            self._poller.register(self._publisher.replay, zmq.POLLIN)
        else:
            self._poller.unregister(self._publisher.replay)

    def _handle(self, message: messages.ApiServerMessage) -> None:
        match message:
            case messages.Add(request):
                try:
                    self._engine.add(request)
                except ValueError as error:
                    self._refused.append(_refusal(request.request_id, str(error)))
                except Exception as error:  # whatever a client has sent, it ends its own request alone
                    logger.exception("request %s cannot be taken", request.request_id)
                    reason = f"the engine cannot take this request ({type(error).__name__}); its log says why"
                    self._refused.append(_failure(request.request_id, reason))
            case messages.Abort(request_ids):
                for request_id in request_ids:
                    self._engine.abort(request_id)
            case messages.SnapshotRequest(ticket):
                self._publisher.publish_events(self._engine.take_events(), time.time())
                snapshot = Snapshot(self._publisher.last_sequence, self._engine.snapshot())
                send(self._router, self._api_server, messages.SnapshotReply(ticket, encode_event(snapshot)))
            case messages.Hint(request):
                try:
                    self._engine.hint(request)
                except Exception:  # whatever a client has sent, it costs its own hint alone
                    logger.exception("hints on a session cannot be taken")
            case messages.Prefetch(request_ids, ttl_s):
                self._engine.prefetch(request_ids, ttl_s)
            case messages.SwitchRole(role):
                self._role = role
                if self._transfer is not None:
                    self._transfer.role = role
            case messages.Stop():
                self._stopping = True
            case messages.Hello():
                logger.warning("a second hello is ignored: a core serves the front that started it")

    def _send(self, outputs: list[Output]) -> None:
        """Sends all outputs of a step in one message with the statistics, or the statistics alone if
        they have changed.
        """
        stats, now_s = self._engine.stats(), time.monotonic()
        stats.weights_sent_bytes = self._weights_sent_bytes()
        is_due = self._engine.only_receives and now_s - self._sent_s >= _HEARTBEAT_S
        if outputs or is_due or stats != self._sent_stats:
            self._sent_stats, self._sent_s = stats, now_s
            send(self._router, self._api_server, messages.StepOutputs(outputs, stats))


def _refusal(request_id: str, reason: str) -> Output:
    return Output(request_id=request_id, token_ids=[], finish_reason="error", error=reason, is_refusal=True)


def _failure(request_id: str, reason: str) -> Output:
    return Output(request_id=request_id, token_ids=[], finish_reason="error", error=reason)


def send(router: zmq.Socket[bytes], api_server: bytes, message: messages.CoreMessage) -> None:
    """Passes a message to ZMQ, which drops it if the HTTP process is gone."""
    router.send_multipart([api_server, messages.encode(message)])


def serve(config: CoreConfig, folder: Path) -> None:
    """Builds the engine while the HTTP process waits, then runs it. Reports failures to the HTTP process before it
    exits.
    """
    begin_s = time.monotonic()
    context = zmq.Context()
    transfer: TransferWorker | None = None
    built: BuiltEngine | BuiltPoolingEngine | None = None
    router = context.socket(zmq.ROUTER)
    zmq_limits.LOCAL.apply(router)
    router.bind(config.address)
    prefetch = None
    import_error: Exception | None = None
    if config.dry_run is None:
        # Before the Hello, which comes when the HTTP process has imported its own packages and read the tokenizer.
        prefetch = begin_prefetch(config.settings, config.weights.peers)
        try:
            import_permanently("mini_infer_engine.runtime.model_runner")
        except Exception as error:
            import_error = error
    imported_s = time.monotonic() - begin_s
    api_server, _ = router.recv_multipart()  # its Hello
    waited_s = time.monotonic() - begin_s - imported_s
    has_ranks = num_ranks(config.settings) > 1 and config.dry_run is None
    if not has_ranks:  # else its ranks have files there too, until they are connected
        shutil.rmtree(folder, ignore_errors=True)  # they are connected: nothing is left behind, however they end
    authenticator = PeerAuthenticator(context, config.peers.secret) if config.peers.secret is not None else None
    try:
        publisher = _publisher(context, config, partial(_publish, router, api_server))
        moves_kv, weights = config.transfer.port > 0, None
        if moves_kv:
            from mini_infer_engine.core_process.kv_transfer import begin_identity, start_transfer
            from mini_infer_engine.core_process.peer_requests import check_peer_request

            weights = begin_identity(config.settings, config.dry_run)
        if import_error is not None:
            raise import_error
        watched = _watched(config, folder) if has_ranks else None
        with quick_switches(_SWITCH_S):  # weights come while kernels are loaded
            built = build_engine(
                config.settings, config.dry_run, watched=watched, moves_kv=moves_kv, weights=config.weights
            )
        if prefetch is not None:
            prefetch.stop()
        if weights is not None and isinstance(built, BuiltEngine):
            sys.setswitchinterval(_SWITCH_S)
            transfer = start_transfer(
                context,
                config.settings,
                config.transfer,
                built.engine,
                built.model_revision,
                built.memory,
                built.open_transport,
                weights,
                check=partial(
                    check_peer_request,
                    max_model_len=built.model.max_model_len,
                    vocab_size=built.model.vocab_size,
                    max_images=built.model.max_images,
                ),
                vocab_size=built.model.vocab_size,
                secret=config.peers.secret,
            )
        if isinstance(built, BuiltEngine) and built.weight_server is not None:
            sys.setswitchinterval(_SWITCH_S)
        gc.collect()
        gc.freeze()  # what is here now stays: without, each full collection walks all of it while requests wait
        kv_transport = "" if transfer is None else transfer.transport_name
        model = msgspec.structs.replace(built.model, kv_transport=kv_transport)
        if model.start_seconds:
            started_s = time.monotonic() - begin_s
            rest_s = round(max(0.0, started_s - waited_s - sum(model.start_seconds.values())), 4)
            before = {"imports": rest_s, "HTTP process": round(waited_s, 4)}
            model = msgspec.structs.replace(model, start_seconds=before | model.start_seconds)
            logger.info("start: %s", ", ".join(f"{name} {took:.2f} s" for name, took in model.start_seconds.items()))
        send(router, api_server, messages.Ready(model))
        role = config.transfer.role
        server = built.weight_server if isinstance(built, BuiltEngine) else None
        sent_bytes = (lambda: 0) if server is None else (lambda: server.sent_bytes)
        warm_up = built.warm_up if isinstance(built, BuiltEngine) else lambda: False
        CoreLoop(
            built.engine, router, publisher, config.parent_pid, api_server, transfer, role, sent_bytes, warm_up
        ).run()
        publisher.close()
    except Exception as error:
        expected = isinstance(error, ValueError | OSError | RunnerLostError)
        send(router, api_server, messages.Failed(str(error) if expected else f"{type(error).__name__}: {error}"))
        if not expected:
            logger.exception("the core process fails")
        raise SystemExit(1) from None
    finally:
        if transfer is not None:  # before its sockets are closed, which are its thread's
            transfer.stop()
        if isinstance(built, BuiltEngine) and built.weight_server is not None:
            built.weight_server.close()
        if authenticator is not None:
            authenticator.close()
        context.destroy(linger=_LINGER_MS)


def _publisher(
    context: zmq.Context[zmq.Socket[bytes]], config: CoreConfig, publish: Callable[[bytes, bytes], None]
) -> EventPublisher:
    """Returns a publisher to gateways, or to the HTTP process if that publishes for several cores."""
    if config.engine is not None:
        return EventPublisher(context, config.peers.host, 0, 0, publish)
    return EventPublisher(
        context, config.peers.host, config.events_port, config.replay_port, secret=config.peers.secret
    )


def _publish(router: zmq.Socket[bytes], api_server: bytes, topic: bytes, payload: bytes) -> None:
    send(router, api_server, messages.Published(topic, payload))


def _watched(config: CoreConfig, folder: Path) -> "Watched":
    """Returns callbacks by which the end of a group of ranks ends this process, even while its main
    thread is blocked.
    """
    from mini_infer_engine.distributed.parallel_runner import Watched

    def end(reason: str) -> None:
        write_reason(config.exit_reason_fd, reason)
        time.sleep(_LOST_S)  # the main thread may say it in the usual way
        os._exit(1)

    return Watched(
        on_lost=end,
        exit_reason_fd=config.exit_reason_fd,
        folder=folder,
        peer_key=config.peers.key,
        weights=config.weights,
        engine=config.engine,
        log_level=config.log_level,
        log_format=config.log_format,
    )


def run(config_path: Path) -> None:
    """Runs the core process that this file configures, until it ends."""
    show_crashes()
    config = msgspec.json.decode(config_path.read_bytes(), type=CoreConfig)
    configure_logging(config.log_level, config.log_format, config.engine)
    # The front decides when to leave, also when the terminal or a supervisor signals the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == config.parent_pid:
        serve(config, config_path.parent)
