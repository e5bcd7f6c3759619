"""Tells the world what is cached and how much there is to do: KV events, their replay, load reports, over ZMQ.

It forms no event and decides nothing about the cache; formats are contract.events'.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from mini_infer_contract import events
from mini_infer_contract.listening import tcp_address

logger = logging.getLogger(__name__)

RING_BATCHES = 10_000
"""Batches kept for replay, at most; who missed more than are kept reads /kv_snapshot."""
RING_BYTES = 64_000_000
"""Of all batches kept: one has up to 8,192 token ids, so that their number alone would bound nothing."""
_LOAD_INTERVAL_S = 0.02
"""Between two load reports, at least."""
_HEARTBEAT_S = 1.0
"""Between two load reports, at most: a silent engine is a dead one."""


class PortInUseError(ValueError):
    """An event socket's port belongs to somebody else."""


class EventPublisher:
    """The sockets of one engine. A port of 0 is no socket: what would be sent there is dropped."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        events_port: int,
        replay_port: int,
        tell: Callable[[bytes, bytes], None] | None = None,
    ) -> None:
        """`tell` is given each topic and payload, too. PortInUseError: a port belongs to somebody else."""
        self._tell = tell
        self._events = _bind(context, zmq.PUB, host, events_port, "--events-port")
        self.replay = _bind(context, zmq.ROUTER, host, replay_port, "--replay-port")
        self.last_sequence = -1
        """Of the last batch of KV events."""
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._load_sequence = -1
        self._last_load: events.LoadReport | None = None
        self._load_postponed = False

    def publish_events(self, new: Sequence[events.KVEvent], now: float) -> None:
        """Send the events of a step as one batch; no events, no batch."""
        if not new:
            return
        self.last_sequence += 1
        payload = events.encode(events.KVEventBatch(ts=now, events=list(new)))
        self._keep(payload)
        self._send(events.EVENTS_TOPIC, self.last_sequence, payload)

    def _keep(self, payload: bytes) -> None:
        """For replay, in place of the oldest where there is no more room; without a replay port nobody can ask."""
        if self.replay is None:
            return
        self._ring.append((self.last_sequence, payload))
        self._ring_bytes += len(payload)
        while len(self._ring) > RING_BATCHES or (self._ring_bytes > RING_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft()[1])

    def load_is_due(self, now: float) -> bool:
        """Whether `publish_load` may send: ask before each, for making a report costs time."""
        due = self._last_load is None or now - self._last_load.ts >= _LOAD_INTERVAL_S
        self._load_postponed = not due
        return due

    def load_wait_s(self, now: float) -> float:
        """How long until `publish_load` should be called again if nothing happens."""
        if self._last_load is None:
            return 0.0
        interval = _LOAD_INTERVAL_S if self._load_postponed else _HEARTBEAT_S
        return max(0.0, self._last_load.ts + interval - now)

    def publish_load(self, report: events.LoadReport, now: float) -> None:
        """Send the report if it says something new, or as a heartbeat."""
        last = self._last_load
        unchanged = last is not None and not report.accepted and _numbers(report) == _numbers(last)
        if unchanged and last is not None and now - last.ts < _HEARTBEAT_S:
            return
        self._last_load = msgspec.structs.replace(report, ts=now)
        self._load_sequence += 1
        self._send(events.LOAD_TOPIC, self._load_sequence, events.encode(self._last_load))

    def _send(self, topic: bytes, sequence: int, payload: bytes) -> None:
        if self._tell is not None:
            self._tell(topic, payload)
        if self._events is not None:
            self._events.send_multipart([topic, events.sequence_frame(sequence), payload])

    def answer_replays(self) -> None:
        """Send each peer that asked the batches from its number on, as far as they are kept, and the end marker."""
        while self.replay is not None:
            try:
                frames = self.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                first = events.read_sequence(frames[-1])
            except events.EventFormatError as error:
                logger.warning("a replay request is ignored: %s", error)
                continue
            for sequence, payload in self._ring:
                if sequence >= first:
                    self.replay.send_multipart([frames[0], *events.replay_frames(sequence, payload)])
            self.replay.send_multipart([frames[0], *events.REPLAY_LAST_FRAMES])

    def close(self) -> None:
        """Close the sockets, what they hold unsent included."""
        for socket in (self._events, self.replay):
            if socket is not None:
                socket.close(linger=0)


def _numbers(report: events.LoadReport) -> tuple[int, int, int, float]:
    return report.running, report.waiting, report.queued_tokens, report.kv_usage


def _bind(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, port: int, flag: str
) -> zmq.Socket[bytes] | None:
    if port == 0:
        return None
    socket = context.socket(kind)
    socket.set(zmq.IPV6, ":" in host)
    socket.set(zmq.SNDHWM, RING_BATCHES + 1)  # a whole replay and its end marker: what is above is dropped
    address = tcp_address(host, port)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise PortInUseError(f"cannot listen on {address} ({error}): choose another {flag}, or 0 for none") from None
    return socket
