"""Replays KV events by sequence number: a bounded buffer of batches, and a server that sends them in slices.

The core calls `serve` between two steps. Its cost is bounded, whatever peers send and however many there are: by bytes
per second over all peers, one replay for each peer, and a few requests read in a call.
"""

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from mini_infer_contract import events

logger = logging.getLogger(__name__)

RING_BATCHES: Final = 10_000
"""The most batches that are buffered for replay. A peer that missed more than these reads /kv_snapshot."""
RING_BYTES: Final = 64_000_000
"""The most bytes of all buffered batches: a batch has up to 8,192 token ids, so their number alone
bounds too little.
"""
BYTES_PER_S: Final = 16_000_000
"""Bytes per second for all peers together: it costs about two percent of a step's time, and fills a gateway's usual gap
within milliseconds.
"""
BURST_BYTES: Final = 256 << 10
"""The most bytes that one call sends: they take less than a millisecond."""
MESSAGE_COST_BYTES: Final = 1 << 10
"""Cost of a message beside its bytes, so that ten thousand small messages are throttled by the time that they take."""
MAX_REPLAYS: Final = 16
"""The most peers with a replay at a time. Requests of further peers are dropped, and their senders read
/kv_snapshot.
"""
READS: Final = 4
"""The most requests that one call reads. Others wait in the socket, whose queues are bounded."""
STALL_S: Final = 10.0
"""Seconds after which a peer that has read nothing loses its replay."""
_COMPLAIN_EVERY_S: Final = 60.0


class EventRing:
    """A buffer of the latest batches, with consecutive sequence numbers."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def append(self, sequence: int, payload: bytes) -> None:
        """Buffers a batch, and drops the oldest ones if there is no more room."""
        self._batches.append((sequence, payload))
        self._bytes += len(payload)
        while len(self._batches) > RING_BATCHES or (self._bytes > RING_BYTES and len(self._batches) > 1):
            self._bytes -= len(self._batches.popleft()[1])

    @property
    def last(self) -> int:
        """The last sequence number; -1 if nothing was buffered yet."""
        return self._batches[-1][0] if self._batches else -1

    def next_from(self, sequence: int) -> tuple[int, bytes] | None:
        """Returns the first buffered batch from `sequence` on, or None if there is none."""
        if sequence > self.last:
            return None
        return self._batches[max(0, sequence - self._batches[0][0])]


@dataclass(slots=True)
class _Replay:
    """The rest of a replay to one peer."""

    peer: bytes
    next: int
    end: int
    """The last sequence number at the time of the request: the peer gets later batches as events."""
    moved_s: float
    """Time at which the peer last accepted a message."""


class ReplayServer:
    """Answers replay requests at a bound ROUTER socket, which must have ROUTER_MANDATORY set."""

    def __init__(self, socket: zmq.Socket[bytes], ring: EventRing, clock: Callable[[], float]) -> None:
        self._socket, self._ring, self._clock = socket, ring, clock
        self._replays: deque[_Replay] = deque()
        self._allowance, self._refilled_s = float(BURST_BYTES), clock()
        self.dropped = 0
        """Number of requests that were dropped: too many peers, a second request of a peer, or a malformed one."""
        self._complained_s, self._complained = -math.inf, 0

    @property
    def is_busy(self) -> bool:
        """True while a peer waits for batches."""
        return bool(self._replays)

    def is_open(self) -> bool:
        """Returns True if `serve` would read requests now; only then should the socket be polled."""
        self._refill()
        return self._allowance > 0

    def wait_s(self) -> float:
        """Returns the seconds for which `serve` has nothing to do if no request comes."""
        self._refill()
        if self._allowance <= 0:
            return (MESSAGE_COST_BYTES - self._allowance) / BYTES_PER_S
        return 0.001 if self._replays else math.inf  # a peer that does not read is tried again so soon

    def serve(self) -> None:
        """Reads a few requests, and sends one slice of the pending batches."""
        self._refill()
        self._read()
        for _ in range(len(self._replays)):
            if self._allowance <= 0:
                break
            if self._send_some(self._replays[0]):
                self._replays.rotate(-1)
            else:
                self._replays.popleft()

    def _refill(self) -> None:
        now_s = self._clock()
        grown = self._allowance + (now_s - self._refilled_s) * BYTES_PER_S
        self._allowance, self._refilled_s = min(float(BURST_BYTES), grown), now_s

    def _read(self) -> None:
        for _ in range(READS):
            if self._allowance <= 0:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._allowance -= MESSAGE_COST_BYTES
            self._begin(frames)

    def _begin(self, frames: list[bytes]) -> None:
        try:
            first = events.read_sequence(frames[-1])
        except events.EventFormatError as error:
            self._drop(str(error))
            return
        if any(replay.peer == frames[0] for replay in self._replays):
            self._drop("its peer has one in progress")
        elif len(self._replays) >= MAX_REPLAYS:
            self._drop(f"{MAX_REPLAYS} peers are being sent to")
        else:
            self._replays.append(_Replay(frames[0], first, self._ring.last, self._clock()))

    def _drop(self, why: str) -> None:
        self.dropped += 1
        now_s = self._clock()
        if now_s - self._complained_s >= _COMPLAIN_EVERY_S:
            logger.warning(
                "a replay request is dropped: %s (%d since the last such line)", why, self.dropped - self._complained
            )
            self._complained_s, self._complained = now_s, self.dropped

    def _send_some(self, replay: _Replay) -> bool:
        """Sends until the allowance is used up or the peer's queue is full. Returns False once the replay has ended."""
        try:
            while self._allowance > 0:
                batch = self._ring.next_from(replay.next) if replay.next <= replay.end else None
                if batch is None:
                    self._send(replay, events.REPLAY_LAST_FRAMES)
                    return False
                self._send(replay, events.replay_frames(*batch))
                replay.next = batch[0] + 1
        except zmq.Again:
            return self._clock() - replay.moved_s < STALL_S
        except zmq.ZMQError:  # EHOSTUNREACH: the peer is gone
            return False
        return True

    def _send(self, replay: _Replay, frames: "list[bytes] | tuple[bytes, ...]") -> None:
        self._socket.send_multipart([replay.peer, *frames], zmq.NOBLOCK)
        self._allowance -= sum(map(len, frames)) + MESSAGE_COST_BYTES
        replay.moved_s = self._clock()
