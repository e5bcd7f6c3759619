"""Runs the transfer thread: control sockets and transport of one engine, beside the core's thread, which never waits
for it.

The thread must run while a pass computes, however long that takes: it renews leases and polls writes. An exception
costs the message or the job that it is about. If the thread itself fails, its sockets close, so that other engines
notice, and the core goes on without KV transfer.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

import msgspec
import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.core.faults import FaultLog
from mini_infer_engine.core.guarded_connector import FAULT
from mini_infer_engine.core.kv_transfer import KVTransferStats
from mini_infer_engine.kv_transfer.consumer import KVConsumer
from mini_infer_engine.kv_transfer.consumer_jobs import KVConsumerLimits
from mini_infer_engine.kv_transfer.estimates import Load
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.producer import KVProducer
from mini_infer_engine.kv_transfer.protocol import events, wire
from mini_infer_engine.kv_transfer.stats import Counters
from mini_infer_engine.kv_transfer.transport import BUSY_S, TEND_S, Transport

log = logging.getLogger(__name__)

_IDLE_MS = 50
"""Milliseconds between two checks of leases while nothing is in flight."""
_STATS_INTERVAL_S = 0.02
"""Seconds between two copies of the counters under load: this thread's Python code delays the core's thread, which
needs the same interpreter lock.
"""
_HAND_OVER_S = 0.00002
"""Seconds that a thread sleeps after an urgent command or event, to release the interpreter lock. Otherwise it goes on
with less urgent work while the other thread, which has been woken, waits for the lock: 0.25 ms at each end of a
prefill, as measured.
"""
_MESSAGES_PER_ITERATION = 256
"""The most messages that are read from the port before transfers in flight are polled again."""
_MAX_FAULTY_ITERATIONS = 100
"""Failed turns in a row after which the thread counts as failed. In such turns nothing is transferred, and leases do
not expire.
"""
_URGENT = (events.Take, events.PrefillRequest, events.SendEnd, events.TransferDone)
"""Commands and events on which the time to the first token depends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The constant part of this engine's description for its peers."""

    engine_id: str
    weights: str
    memory: KVMemory


class TransferWorker:
    """Owns the transfer thread. The core's thread calls the public methods; the thread runs the private ones."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        router: zmq.Socket[bytes],
        role: str,
        limits: KVConsumerLimits,
        secret: PeerSecret | None = None,
    ) -> None:
        """Prepares the thread. `router` is bound, and belongs to the thread from now on. `secret` proves this engine's
        membership to its peers.
        """
        self.identity = identity
        self.role = role
        self.transport_name = transport.name
        self.events: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        """The exception by which the thread has ended; None while it runs."""
        self.load = Load()
        self._commands: deque[events.Command] = deque()
        self._transport, self._router = transport, router
        self._where = transport.describe()
        self._wakes_thread, self._thread_woken = socket.socketpair()
        self._wakes_core, self.core_woken = socket.socketpair()
        for end in (self._wakes_thread, self._thread_woken, self._wakes_core, self.core_woken):
            end.setblocking(False)
        self._stopping = False
        self._counters = Counters()
        self._faults = FaultLog()
        self._stats_sent_s = self._tended_s = 0.0
        self.stats = KVTransferStats(bytes_per_token=identity.memory.layout.group_token_bytes)
        self._poller = zmq.Poller()
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(self._thread_woken, zmq.POLLIN)
        layout = identity.memory.layout
        self._producer = KVProducer(
            self._party, transport, layout, self._send, self._report, self._counters, self._faults
        )
        self._producer.load = self.load
        self._consumer = KVConsumer(
            router.context,
            self._poller,
            self._party,
            transport,
            layout,
            self._report,
            self._counters,
            limits,
            self.load,
            self._faults,
            secret,
        )
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def _party(self) -> wire.Party:
        return wire.Party(
            version=wire.VERSION,
            engine_id=self.identity.engine_id,
            role=self.role,
            weights=self.identity.weights,
            layout=self.identity.memory.layout,
            where=self._where,
        )

    # -- The core's

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def do(self, command: events.Command) -> None:
        """Queues a command for the thread. Commands are dropped once the thread has failed."""
        if self.failure is not None:
            return
        self._commands.append(command)
        _wake(self._wakes_thread)
        _hand_over(command)

    def drain_wakes(self) -> None:
        """Clears the wake-ups of the core. Call it before reading `events`."""
        _drain(self.core_woken)

    def stop(self) -> None:
        """Ends the thread, with all transfers in flight."""
        self._stopping = True
        _wake(self._wakes_thread)
        self._thread.join(5.0)

    # -- The thread's

    def _run(self) -> None:
        try:
            self._transport.enter_thread()
            num_faulty = 0
            while not self._stopping:
                try:
                    self._iterate()
                    num_faulty = 0
                except Exception as error:
                    num_faulty += 1
                    self._faults.record("a turn of the transfer thread", error)
                    if num_faulty >= _MAX_FAULTY_ITERATIONS:
                        raise
        except BaseException as error:
            log.exception("the thread of KV transfer fails: nothing moves any more")
            self.failure = error
            _wake(self._wakes_core)
        finally:
            self._router.close(linger=0)
            self._consumer.close()

    def _iterate(self) -> None:
        if self._producer.is_busy or self._consumer.is_busy:
            ready = dict(self._poller.poll(0))
            if not ready and not self._commands:
                time.sleep(BUSY_S)
        else:
            ready = dict(self._poller.poll(_IDLE_MS))
        _drain(self._thread_woken)
        now_s = time.monotonic()
        while self._commands:
            self._do(self._commands.popleft(), now_s)
        if self._router in ready:
            self._serve(now_s)
        self._consumer.receive(ready, now_s)
        now_s = time.monotonic()
        self._producer.advance(now_s)
        self._consumer.advance(now_s)
        if now_s >= self._stats_sent_s + _STATS_INTERVAL_S or not (
            ready or self._producer.is_busy or self._consumer.is_busy
        ):
            self._stats_sent_s = now_s
            self._report_stats()
        if now_s >= self._tended_s + TEND_S:
            self._tended_s = now_s
            try:
                self._transport.tend()
            except Exception as error:
                self._faults.record("tending the transport", error)

    def _do(self, command: events.Command, now_s: float) -> None:
        match command:
            case events.Take(job):
                try:
                    self._consumer.take(command, now_s)
                except Exception as error:
                    self._faults.record("the command Take", error)
                    self._report(
                        events.TransferFailed(job, FAULT, "this engine's KV transfer has a fault; its log says which")
                    )
            case events.Cancel(job):
                try:
                    self._consumer.cancel(job)
                except Exception as error:
                    self._faults.record("the command Cancel", error)
            case _:
                self._producer.do(command)

    def _serve(self, now_s: float) -> None:
        for _ in range(_MESSAGES_PER_ITERATION):
            try:
                peer, payload = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError as error:
                self._faults.record("a message to the transfer port, which has not two frames,", error)
                continue
            try:
                message = wire.decode_from_consumer(payload)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                self._faults.record("decoding a message to the transfer port", error)
                self._send(peer, wire.Refused(f"that is no message of version {wire.VERSION}"))
                continue
            self._producer.handle(peer, message, now_s)

    def _send(self, peer: bytes, message: wire.FromProducer) -> None:
        try:
            self._router.send_multipart([peer, wire.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            log.info("a peer takes no messages: it finds out by its own time-out")
        except Exception as error:
            self._faults.record(f"sending {type(message).__name__} to another engine", error)

    def _report(self, event: events.Event) -> None:
        self.events.put(event)
        _wake(self._wakes_core)
        _hand_over(event)

    def _report_stats(self) -> None:
        counters, producer, consumer = self._counters, self._producer, self._consumer
        stats = replace(
            self.stats,
            received=counters.received,
            received_bytes=counters.received_bytes,
            received_s=counters.received_s,
            estimated_s=counters.estimated_s,
            estimate_error_s=counters.estimate_error_s,
            sent=counters.sent,
            sent_bytes=counters.sent_bytes,
            sent_s=counters.sent_s,
            leases_expired=counters.leases_expired,
            fallbacks=dict(counters.fallbacks),
            mismatches=dict(counters.mismatches),
            open_leases=producer.num_open + consumer.num_open,
            bytes_per_s=max(producer.bytes_per_s, consumer.bytes_per_s),
            faults=self._faults.num_faults,
        )
        if stats != self.stats:
            self.stats = stats
            _wake(self._wakes_core)


def _wake(end: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):  # enough wakes are waiting
        end.send(b"w")


def _hand_over(item: events.Command | events.Event) -> None:
    if isinstance(item, _URGENT):
        time.sleep(_HAND_OVER_S)


def _drain(end: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while end.recv(4096):
            pass
