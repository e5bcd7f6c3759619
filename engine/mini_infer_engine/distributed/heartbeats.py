"""Exchanges heartbeats between ranks: each rank sends its state to the first rank, which answers.

Silence is counted in this process's own ticks. A process that was stopped together with the others, or gets no CPU
time, therefore detects no false losses. This module does not know what ranks compute.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_process import zmq_limits
from mini_infer_process.curve import secure_client

logger = logging.getLogger(__name__)

TICK_S = 0.25
SILENT_TICKS = 12
"""Ticks without a heartbeat after which a rank counts as hung: 3 s. A thread of its own sends them, so neither a long
pass delays them nor garbage collection, because objects made while loading are frozen. A smaller limit would end
healthy groups on busy machines. A larger one would leave no room in the five seconds within which the whole group has
to end.
"""
LOADING_TICKS = 80
"""Ticks without a heartbeat after which a rank counts as hung while the model is loaded: 20 s, because long library
calls may block a process.
"""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat without news."""


class Reached(msgspec.Struct, frozen=True, tag=True):
    """Reports that the rank has reached a point where all must agree, with its number."""

    value: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Reports that the rank has failed and ends; the reason is for people."""

    reason: str


HeartbeatMessage = Alive | Reached | Failed
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HeartbeatMessage).decode


class Watch:
    """The first rank's end: a thread that receives heartbeats of all other ranks, and detects the end of the group."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        ranks: range,
        ended: Callable[[], Mapping[int, int]],
        on_lost: Callable[[str], None],
        group: str = "tensor-parallel group",
    ) -> None:
        """Starts the thread. `ended` returns the exit statuses of ranks whose processes have ended. The thread calls
        `on_lost` once, with the reason.

        `group` names the kind of group, for messages to people.
        """
        self._router, self._ranks, self._ended, self._on_lost = router, ranks, ended, on_lost
        self._group = group
        self._silent: dict[int, int] = {}
        """Ticks since the last heartbeat, by rank. A rank is in it from its first heartbeat on."""
        self._reached: dict[int, list[int]] = {rank: [] for rank in ranks}
        self._changed = threading.Condition()
        self._stopping = False
        self._limit = LOADING_TICKS
        self.lost = ""
        """The reason why the group has ended, or an empty string while it runs."""
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def loaded(self) -> None:
        """Shortens the limit of silence, once the model is loaded."""
        self._silent, self._limit = dict.fromkeys(self._silent, 0), SILENT_TICKS

    def gather(self) -> list[int]:
        """Waits until all ranks have reached the next point, and returns one number of each. Raises RuntimeError if the
        group has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.lost or all(self._reached.values()))
            if self.lost:
                raise RuntimeError(self.lost)
            return [self._reached[rank].pop(0) for rank in self._ranks]

    def reason(self, wait_s: float) -> str:
        """Waits up to `wait_s` for the end of the group. Returns its reason, or an empty string if the group still
        runs.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.lost, wait_s)
            return self.lost

    def close(self) -> None:
        """Ends the thread: from now on ranks may leave."""
        self._stopping = True
        self._thread.join(2 * TICK_S + 1)

    def _run(self) -> None:
        next_tick_s = time.monotonic() + TICK_S
        while not self._stopping:
            if self._router.poll(max(1, int((next_tick_s - time.monotonic()) * 1000))):
                self._receive()
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + TICK_S  # a late tick counts once
                for rank in self._silent:
                    self._silent[rank] += 1
            if (reason := self._find()) and not self._stopping:
                self._lose(reason)
                return

    def _receive(self) -> None:
        while True:
            try:
                name, payload = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank, message = int(name), _decode(payload)
            self._silent[rank] = 0
            match message:
                case Reached(value):
                    with self._changed:
                        self._reached[rank].append(value)
                        self._changed.notify_all()
                case Failed(reason):
                    self._lose(reason)
                    return
                case Alive():
                    self._router.send_multipart([name, _encode(Alive())])

    def _find(self) -> str:
        if self.lost:
            return self.lost
        for rank, status in self._ended().items():
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            return f"rank {rank} of the {self._group} {how}"
        for rank, ticks in self._silent.items():
            if ticks >= self._limit:
                return f"rank {rank} of the {self._group} hangs: no heartbeat for {ticks * TICK_S:g} s"
        return ""

    def _lose(self, reason: str) -> None:
        with self._changed:
            first, self.lost = not self.lost, self.lost or reason
            self._changed.notify_all()
        if first:
            logger.error("%s: the group ends", reason)
            self._on_lost(reason)


class HeartbeatSender:
    """The end of each other rank: a thread that sends its heartbeats, and detects the loss of the first rank."""

    def __init__(
        self, address: str, rank: int, on_lost: Callable[[str], None], secret: PeerSecret | None = None
    ) -> None:
        """Starts the thread, which calls `on_lost` once. `secret` proves membership to a first rank on another node."""
        self._secret = secret
        self._address, self._rank, self._on_lost = address, rank, on_lost
        self._waiting: queue.SimpleQueue[HeartbeatMessage] = queue.SimpleQueue()
        self._silent, self._limit = 0, LOADING_TICKS
        self._all_sent = threading.Event()
        threading.Thread(target=self._run, name="signs-of-life", daemon=True).start()

    def loaded(self) -> None:
        """Shortens the limit of silence, once the first rank is ready for requests."""
        self._silent, self._limit = 0, SILENT_TICKS

    def reached(self, value: int) -> None:
        """Sends `Reached`."""
        self._waiting.put(Reached(value))

    def failed(self, reason: str) -> None:
        """Sends `Failed`, and waits until it has been passed to the network."""
        self._waiting.put(Failed(reason))
        self._all_sent.wait(4 * TICK_S)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        zmq_limits.LOCAL.apply(socket)
        secure_client(socket, self._secret)
        socket.set(zmq.IDENTITY, str(self._rank).encode())
        socket.set(zmq.LINGER, 1000)
        socket.set(zmq.IPV6, 1)
        socket.connect(self._address)
        while self._silent < self._limit:
            socket.send(_encode(Alive()))
            try:
                message = self._waiting.get(timeout=TICK_S)
                socket.send(_encode(message))
                if isinstance(message, Failed):
                    break
            except queue.Empty:
                self._silent += 1
            while socket.poll(0):
                socket.recv()
                self._silent = 0
        socket.close()
        context.term()
        self._all_sent.set()
        if self._silent >= self._limit:
            self._on_lost(f"the first rank hangs or has ended: no heartbeat for {self._silent * TICK_S:g} s")
