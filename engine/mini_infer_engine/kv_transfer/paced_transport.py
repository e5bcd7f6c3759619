"""Another transport's bytes at no more than so many a second, for a network that others use, too.

A motion counts as on its way until its bytes would have gone through a link of that speed, one motion after the other.
"""

import time
from collections.abc import Callable

from mini_infer_engine.kv_transfer.layout import KVLayout, Span
from mini_infer_engine.kv_transfer.staging import Area
from mini_infer_engine.kv_transfer.transport import How, Motion, Progress, Transport
from mini_infer_engine.kv_transfer.wire import TransportAddress

Clock = Callable[[], float]


class _Link:
    """What bytes go through one after the other."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s, self._free_s = bytes_per_s, 0.0

    def passed_s(self, num_bytes: int, begin_s: float) -> float:
        """When bytes that came at `begin_s` have gone through, after those before them."""
        self._free_s = max(self._free_s, begin_s) + num_bytes / self._bytes_per_s
        return self._free_s


class _PacedMotion:
    """See `Motion`."""

    def __init__(self, motion: Motion, link: _Link, clock: Clock) -> None:
        self._motion, self._link, self._clock = motion, link, clock
        self._begin_s, self._end_s = clock(), 0.0

    @property
    def num_bytes(self) -> int:
        """See `Motion.num_bytes`."""
        return self._motion.num_bytes

    def progress(self) -> Progress:
        """See `Motion.progress`."""
        found = self._motion.progress()
        if found != "done":
            return found
        if not self._end_s:
            self._end_s = self._link.passed_s(self._motion.num_bytes, self._begin_s)
        return "done" if self._clock() >= self._end_s else "busy"


class PacedTransport:
    """See `Transport`; what is copied within this engine is not paced."""

    def __init__(self, transport: Transport, bytes_per_s: int, clock: Clock = time.monotonic) -> None:
        self.name = transport.name
        self._transport, self._link, self._clock = transport, _Link(bytes_per_s), clock

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
        return _PacedMotion(self._transport.start(engine_id, how, span), self._link, self._clock)

    def way(self, engine_id: str, span: Span) -> Area | None:
        """See `Transport.way`."""
        return self._transport.way(engine_id, span)

    def slot_bytes(self, engine_id: str, area: Area) -> int:
        """See `Transport.slot_bytes`."""
        return self._transport.slot_bytes(engine_id, area)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """See `Transport.stage`."""
        return self._transport.stage(engine_id, area, slot, span)

    def fetch(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """See `Transport.fetch`."""
        return _PacedMotion(self._transport.fetch(engine_id, area, slot, span), self._link, self._clock)

    def close(self) -> None:
        """See `Transport.close`."""
        self._transport.close()
