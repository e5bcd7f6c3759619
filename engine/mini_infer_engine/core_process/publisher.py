"""Publishes the engine's cached blocks and its load over ZMQ: KV events, their replay, and load reports.

It creates no events and decides nothing about the cache; contract.events defines the formats.
"""

import math
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from mini_infer_contract import events
from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.core_process.replays import EventRing, ReplayServer
from mini_infer_process import zmq_limits
from mini_infer_process.curve import secure_server
from mini_infer_process.listening import tcp_address
from mini_infer_process.zmq_limits import SocketLimits

_LOAD_INTERVAL_S = 0.02
"""The least seconds between two load reports."""
_HEARTBEAT_S = 1.0
"""The most seconds between two load reports: gateways take a silent engine for a dead one."""


class PortInUseError(ValueError):
    """The port of an event socket is used by another process."""


class EventPublisher:
    """The event sockets of one engine. A port of 0 means no socket: messages for it are dropped."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        events_port: int,
        replay_port: int,
        publish: Callable[[bytes, bytes], None] | None = None,
        secret: PeerSecret | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds the sockets. `publish` is called with each topic and payload, too. Raises PortInUseError if a port is
        taken.

        With a secret both sockets admit only the service's peers, by a `PeerAuthenticator` of the context.
        """
        self._publish = publish
        self._events = _bind(context, zmq.PUB, host, events_port, "--events-port", zmq_limits.EVENTS, secret)
        self.replay = _bind(context, zmq.ROUTER, host, replay_port, "--replay-port", zmq_limits.REPLAY, secret)
        self.last_sequence = -1
        """Sequence number of the last batch of KV events; -1 if there was none."""
        self._ring = EventRing()
        self._replays = ReplayServer(self.replay, self._ring, clock) if self.replay is not None else None
        self._load_sequence = -1
        self._last_load: events.LoadReport | None = None
        self._load_postponed = False

    def publish_events(self, new: Sequence[events.KVEvent], now: float) -> None:
        """Sends the events of a step as one batch. Does nothing if there are none."""
        if not new:
            return
        self.last_sequence += 1
        payload = events.encode(events.KVEventBatch(ts=now, events=list(new)))
        if self._replays is not None:  # else nobody can ask for it
            self._ring.append(self.last_sequence, payload)
        self._send(events.EVENTS_TOPIC, self.last_sequence, payload)

    def load_is_due(self, now: float) -> bool:
        """Returns True if `publish_load` may send now. Call it before making a report, which costs time."""
        due = self._last_load is None or now - self._last_load.ts >= _LOAD_INTERVAL_S
        self._load_postponed = not due
        return due

    def load_wait_s(self, now: float) -> float:
        """Returns the seconds until `publish_load` should be called again if nothing happens."""
        if self._last_load is None:
            return 0.0
        interval = _LOAD_INTERVAL_S if self._load_postponed else _HEARTBEAT_S
        return max(0.0, self._last_load.ts + interval - now)

    def publish_load(self, report: events.LoadReport, now: float) -> None:
        """Sends the report if it differs from the last one, or as a heartbeat."""
        last = self._last_load
        unchanged = last is not None and not report.accepted and _numbers(report) == _numbers(last)
        if unchanged and last is not None and now - last.ts < _HEARTBEAT_S:
            return
        self._last_load = msgspec.structs.replace(report, ts=now)
        self._load_sequence += 1
        self._send(events.LOAD_TOPIC, self._load_sequence, events.encode(self._last_load))

    def _send(self, topic: bytes, sequence: int, payload: bytes) -> None:
        if self._publish is not None:
            self._publish(topic, payload)
        if self._events is not None:
            self._events.send_multipart([topic, events.sequence_frame(sequence), payload])

    def answer_replays(self) -> None:
        """Reads some replay requests, and sends one slice of the pending batches; see `ReplayServer`."""
        if self._replays is not None:
            self._replays.serve()

    def replay_wait_s(self) -> float:
        """Returns the seconds for which `answer_replays` has nothing to do if no request comes."""
        return math.inf if self._replays is None else self._replays.wait_s()

    def has_replay_requests(self) -> bool:
        """Returns True if a replay request waits in the socket."""
        return self.replay is not None and bool(self.replay.poll(0, zmq.POLLIN))

    def accepts_replays(self) -> bool:
        """Returns True if a replay request would be read now; only then should the socket be polled."""
        return self._replays is not None and self._replays.is_open()

    def close(self) -> None:
        """Closes the sockets, and drops messages that are not sent yet."""
        for socket in (self._events, self.replay):
            if socket is not None:
                socket.close(linger=0)


def _numbers(report: events.LoadReport) -> tuple[int, int, int, float]:
    return report.running, report.waiting, report.queued_tokens, report.kv_usage


def _bind(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    host: str,
    port: int,
    flag: str,
    limits: SocketLimits,
    secret: PeerSecret | None,
) -> zmq.Socket[bytes] | None:
    if port == 0:
        return None
    socket = context.socket(kind)
    socket.set(zmq.IPV6, ":" in host)
    limits.apply(socket)
    secure_server(socket, secret)
    if kind == zmq.ROUTER:
        socket.set(zmq.ROUTER_MANDATORY, 1)  # a full queue says so, and a replay waits
    address = tcp_address(host, port)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise PortInUseError(f"cannot listen on {address} ({error}): choose another {flag}, or 0 for none") from None
    return socket
