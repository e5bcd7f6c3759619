"""Another transport's bytes at no more than so many a second, for a network that others use, too.

Motions go through a link one after the other: the next one begins when the bytes of those before it would have gone
through a link of that speed, so that a motion is the most that is sent at once.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from mini_infer_engine.kv_transfer.layout import KVLayout, Span
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.transport import How, Motion, Progress, Transport, TransportError

Clock = Callable[[], float]


class _PacedMotion:
    """See `Motion`."""

    def __init__(self, link: "_Link", begin: Callable[[], Motion], asked_s: float) -> None:
        self._link, self._begin = link, begin
        self.asked_s = asked_s
        self.motion: Motion | None = None
        self.state: Progress = "busy"

    @property
    def num_bytes(self) -> int:
        """See `Motion.num_bytes`."""
        return 0 if self.motion is None else self.motion.num_bytes

    def begin(self) -> None:
        """Its turn has come."""
        try:
            self.motion = self._begin()
        except TransportError:  # the peer has gone meanwhile: nothing moves
            self.state = "failed"

    def progress(self) -> Progress:
        """See `Motion.progress`."""
        if self.state == "busy":
            self._link.advance()
        return self.state


class _Link:
    """What motions go through, in order. Whoever looks at one of them looks at the first, too."""

    def __init__(self, bytes_per_s: int, clock: Clock) -> None:
        self._bytes_per_s, self._clock = bytes_per_s, clock
        self._waiting: deque[_PacedMotion] = deque()
        self._free_s = 0.0

    def add(self, begin: Callable[[], Motion]) -> Motion:
        """The last one in line; where nothing moves, it begins now."""
        motion = _PacedMotion(self, begin, self._clock())
        self._waiting.append(motion)
        self.advance()
        return motion

    def advance(self) -> None:
        """End what has gone through, and begin what comes next."""
        now_s = self._clock()
        while self._waiting:
            first = self._waiting[0]
            if first.motion is None and first.state == "busy":
                first.begin()
            if first.motion is not None:
                found = first.motion.progress()
                if found == "busy":
                    return
                passed_s = max(self._free_s, first.asked_s) + first.motion.num_bytes / self._bytes_per_s
                if found == "done" and now_s < passed_s:
                    return
                first.state = found
                self._free_s = passed_s if found == "done" else now_s
            self._waiting.popleft()


class PacedTransport:
    """See `Transport`."""

    def __init__(self, transport: Transport, bytes_per_s: int, clock: Clock = time.monotonic) -> None:
        self.name = transport.name
        self._transport, self._link = transport, _Link(bytes_per_s, clock)

    def enter_thread(self) -> None:
        """See `Transport.enter_thread`."""
        self._transport.enter_thread()

    def describe(self) -> TransportAddress:
        """See `Transport.describe`."""
        return self._transport.describe()

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """See `Transport.add_peer`."""
        self._transport.add_peer(engine_id, layout, where)

    def remove_peer(self, engine_id: str) -> None:
        """See `Transport.remove_peer`."""
        self._transport.remove_peer(engine_id)

    def tend(self) -> None:
        """See `Transport.tend`."""
        self._transport.tend()

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """See `Transport.start`."""
        return self._link.add(partial(self._transport.start, engine_id, how, span))

    def way(self, engine_id: str, span: Span) -> Area | None:
        """See `Transport.way`."""
        return self._transport.way(engine_id, span)

    def slot_bytes(self, engine_id: str, area: Area) -> int:
        """See `Transport.slot_bytes`."""
        return self._transport.slot_bytes(engine_id, area)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """See `Transport.stage`."""
        return self._transport.stage(engine_id, area, slot, span)

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """See `Transport.push`."""
        return self._link.add(partial(self._transport.push, engine_id, area, slot, their_slot, span))

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """See `Transport.place`."""
        return self._transport.place(engine_id, area, slot, span)

    def close(self) -> None:
        """See `Transport.close`."""
        self._transport.close()
