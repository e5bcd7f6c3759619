"""Limits another transport to a number of bytes per second, for a network that others use, too.

Motions pass a simulated link one after the other: the next one begins when the bytes of those before it would have
passed a link of that speed. A burst is therefore at most one motion.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from mini_infer_engine.kv_transfer.layout import KVLayout, Pool, Span
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.transport import Digest, How, Motion, Progress, Transport, TransportError

Clock = Callable[[], float]


class _PacedMotion:
    """A `Motion` that waits for its turn on the link."""

    def __init__(self, link: "_Link", begin: Callable[[], Motion], requested_s: float) -> None:
        self._link, self._begin = link, begin
        self.requested_s = requested_s
        self.motion: Motion | None = None
        self.state: Progress = "busy"

    @property
    def num_bytes(self) -> int:
        """Bytes of the wrapped motion; 0 until it has begun."""
        return 0 if self.motion is None else self.motion.num_bytes

    def begin(self) -> None:
        """Begins the wrapped motion, which fails if the peer has gone meanwhile."""
        try:
            self.motion = self._begin()
        except TransportError:  # the peer has gone meanwhile: nothing moves
            self.state = "failed"

    def progress(self) -> Progress:
        """Advances the link, and returns this motion's state."""
        if self.state == "busy":
            self._link.advance()
        return self.state


class _Link:
    """A simulated link, which motions pass in order. Polling any motion advances the first one, too."""

    def __init__(self, bytes_per_s: int, clock: Clock) -> None:
        self._bytes_per_s, self._clock = bytes_per_s, clock
        self._waiting: deque[_PacedMotion] = deque()
        self._free_s = 0.0

    def add(self, begin: Callable[[], Motion]) -> Motion:
        """Queues a motion, which begins at once if the link is idle."""
        motion = _PacedMotion(self, begin, self._clock())
        self._waiting.append(motion)
        self.advance()
        return motion

    def advance(self) -> None:
        """Ends motions that have passed, and begins the next one."""
        now_s = self._clock()
        while self._waiting:
            first = self._waiting[0]
            if first.motion is None and first.state == "busy":
                first.begin()
            if first.motion is not None:
                found = first.motion.progress()
                if found == "busy":
                    return
                passed_s = max(self._free_s, first.requested_s) + first.motion.num_bytes / self._bytes_per_s
                if found == "done" and now_s < passed_s:
                    return
                first.state = found
                self._free_s = passed_s if found == "done" else now_s
            self._waiting.popleft()


class PacedTransport:
    """Implements `transport.Transport` by another one, and paces its transfers between engines."""

    def __init__(self, transport: Transport, bytes_per_s: int, clock: Clock = time.monotonic) -> None:
        self.name = transport.name
        self._transport, self._link = transport, _Link(bytes_per_s, clock)

    def enter_thread(self) -> None:
        """Prepares the thread for the wrapped transport."""
        self._transport.enter_thread()

    def describe(self) -> TransportAddress:
        """Returns the wrapped transport's address."""
        return self._transport.describe()

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """Connects the wrapped transport to a peer."""
        self._transport.add_peer(engine_id, layout, where)

    def remove_peer(self, engine_id: str) -> None:
        """Disconnects the wrapped transport from a peer."""
        self._transport.remove_peer(engine_id)

    def tend(self) -> None:
        """Frees the wrapped transport's unused resources."""
        self._transport.tend()

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """Queues the transfer on the link."""
        return self._link.add(partial(self._transport.start, engine_id, how, span))

    def staging_area(self, engine_id: str, span: Span) -> Area | None:
        """Returns the wrapped transport's staging buffer, if any."""
        return self._transport.staging_area(engine_id, span)

    def slot_bytes(self, engine_id: str, area: Area, pool: Pool = "pages") -> int:
        """Returns the bytes of the wrapped transport's slots."""
        return self._transport.slot_bytes(engine_id, area, pool)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Gathers tokens at once: nothing leaves the host."""
        return self._transport.stage(engine_id, area, slot, span)

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """Queues the write of a slot on the link."""
        return self._link.add(partial(self._transport.push, engine_id, area, slot, their_slot, span))

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Copies a slot into pages at once: nothing leaves the host."""
        return self._transport.place(engine_id, area, slot, span)

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        """Begins to compute a digest at once: nothing leaves the host."""
        return self._transport.digest(span, consumer)

    def close(self) -> None:
        """Closes the wrapped transport."""
        self._transport.close()
