"""Replay of KV events by sequence number: a bounded buffer of batches, and a server that sends them in slices.

The core calls `serve` between two steps. What one call may cost is bounded, whatever peers send and however many there
are: bytes a second over all of them, one replay a peer, and few requests read at a time.
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
"""Batches kept for replay, at most; who missed more than are kept reads /kv_snapshot."""
RING_BYTES: Final = 64_000_000
"""Of all batches kept: one has up to 8,192 token ids, so that their number alone would bound nothing."""
BYTES_PER_S: Final = 16_000_000
"""Sent to all peers together: about two percent of a step's time, and a gateway's usual gap within milliseconds."""
BURST_BYTES: Final = 256 << 10
"""What one call sends at most: under a millisecond."""
MESSAGE_COST_BYTES: Final = 1 << 10
"""What a message costs beside its bytes, so that ten thousand small ones are as slow as the time that they take."""
MAX_REPLAYS: Final = 16
"""Peers that are sent to at a time; requests of more are dropped, and their senders read /kv_snapshot."""
READS: Final = 4
"""Requests that one call reads; the rest waits in the socket, whose queues are bounded."""
STALL_S: Final = 10.0
"""A peer that has read nothing for so long loses its replay."""
_COMPLAIN_EVERY_S: Final = 60.0


class EventRing:
    """The latest batches, by consecutive sequence numbers."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def append(self, sequence: int, payload: bytes) -> None:
        """Keeps a batch, in place of the oldest where there is no more room."""
        self._batches.append((sequence, payload))
        self._bytes += len(payload)
        while len(self._batches) > RING_BATCHES or (self._bytes > RING_BYTES and len(self._batches) > 1):
            self._bytes -= len(self._batches.popleft()[1])

    @property
    def last(self) -> int:
        """The last sequence number; -1 if nothing was kept yet."""
        return self._batches[-1][0] if self._batches else -1

    def next_from(self, sequence: int) -> tuple[int, bytes] | None:
        """Returns the first batch that is kept of those from `sequence` on, or None if there is none."""
        if sequence > self.last:
            return None
        return self._batches[max(0, sequence - self._batches[0][0])]


@dataclass(slots=True)
class _Replay:
    """What one peer is still to be sent."""

    peer: bytes
    next: int
    end: int
    """The last sequence number when the peer asked: what came later, it hears as an event."""
    moved_s: float
    """When it last took a message."""


class ReplayServer:
    """Answers requests for replays at a bound ROUTER socket, which must have ROUTER_MANDATORY set."""

    def __init__(self, socket: zmq.Socket[bytes], ring: EventRing, clock: Callable[[], float]) -> None:
        self._socket, self._ring, self._clock = socket, ring, clock
        self._replays: deque[_Replay] = deque()
        self._allowance, self._refilled_s = float(BURST_BYTES), clock()
        self.dropped = 0
        """Requests that were not served: too many peers, a second one of a peer, or no request at all."""
        self._complained_s, self._complained = -math.inf, 0

    @property
    def is_busy(self) -> bool:
        """True while a peer waits for batches."""
        return bool(self._replays)

    def is_open(self) -> bool:
        """Returns True if `serve` would read requests now: only then is the socket worth polling."""
        self._refill()
        return self._allowance > 0

    def wait_s(self) -> float:
        """Returns how long `serve` has nothing to do if no request comes."""
        self._refill()
        if self._allowance <= 0:
            return (MESSAGE_COST_BYTES - self._allowance) / BYTES_PER_S
        return 0.001 if self._replays else math.inf  # a peer that does not read is tried again so soon

    def serve(self) -> None:
        """Reads a few requests, and sends one slice of what peers are due."""
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
        """Sends until the allowance is used up or the peer's queue is full. Returns False once the replay is over."""
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
