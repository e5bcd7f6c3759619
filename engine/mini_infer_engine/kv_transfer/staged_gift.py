"""What is given to one taker through staging slots: gathered, told of, copied by the taker, and the slot is free again.

Several slots are in use at once, so that the next part is gathered while the one before it is copied. It is polled as
any `Motion`; it knows neither leases nor the scheduler.
"""

import itertools
from collections import deque
from collections.abc import Callable

from mini_infer_engine.kv_transfer.layout import Span
from mini_infer_engine.kv_transfer.staging import SLOTS_EACH_WAY
from mini_infer_engine.kv_transfer.transport import Motion, Progress, TransportError

_SLOTS_EACH = SLOTS_EACH_WAY - 2
"""At most, of one gift: each takes the threads of both sides a few turns, of which each may wait for the interpreter's
lock, so that several are on their way; gifts to other takers find slots, too. (CPU engines, 1,500 tokens in 96 slots:
52 ms more than without a transfer with two, 37 with four, 28 with eight.)"""

_FEW_PARTS = 3
"""With fewer on their way a slot goes as it is. Each takes both sides' threads some turns, however full it is."""


class Slots:
    """Of one staging buffer, those for what is given; free ones are handed out in turn."""

    def __init__(self, count: int = SLOTS_EACH_WAY) -> None:
        self._free = deque(range(count))

    def take(self) -> int | None:
        """None: all are in use."""
        return self._free.popleft() if self._free else None

    def free(self, slot: int) -> None:
        """Nobody needs what is in it."""
        self._free.append(slot)


class StagedGift:
    """See the module and `Motion`."""

    def __init__(
        self,
        span: Span,
        divide: Callable[[Span], list[Span]],
        slots: Slots,
        stage: Callable[[int, Span], Motion],
        tell: Callable[[int, int, Span], None],
        serials: "itertools.count[int]",
    ) -> None:
        """`divide`: into parts of a slot each; `stage`: begins to fill a slot; `tell`: says to the taker which slot has
        which part, by a serial number. ValueError: `divide` cannot.
        """
        self._waiting = deque(divide(span))
        self._divide = divide
        self._slots, self._stage, self._tell, self._serials = slots, stage, tell, serials
        self._filling: deque[tuple[int, Span, Motion]] = deque()
        self._told: dict[int, int] = {}
        """Slots, by serial number."""
        self._has_failed = False
        self.num_bytes = 0

    def add(self, span: Span, *, is_last: bool) -> bool:
        """More, while `progress` says that it is busy. False: it fills no slot yet, and enough is on its way."""
        parts = self._divide(span)
        num_on_their_way = len(self._waiting) + len(self._filling) + len(self._told)
        if len(parts) == 1 and num_on_their_way >= _FEW_PARTS and not is_last:
            return False
        if not self._has_failed:
            self._waiting.extend(parts)
            self._fill()
        return True

    def progress(self) -> Progress:
        """See `Motion.progress`. `failed`, as `done`: the pages are read no more."""
        while self._filling and (found := self._filling[0][2].progress()) != "busy":
            slot, part, motion = self._filling.popleft()
            if found == "failed" or self._has_failed:
                self._slots.free(slot)
                self.abandon()
                continue
            self.num_bytes += motion.num_bytes
            serial = next(self._serials)
            self._told[serial] = slot
            self._tell(serial, slot, part)
        self._fill()
        if self._filling or self._told:
            return "busy"
        if self._has_failed:
            return "failed"
        return "busy" if self._waiting else "done"

    def _fill(self) -> None:
        while self._waiting and len(self._filling) + len(self._told) < _SLOTS_EACH:
            slot = self._slots.take()
            if slot is None:
                return
            part = self._waiting.popleft()
            try:
                self._filling.append((slot, part, self._stage(slot, part)))
            except TransportError:
                self._slots.free(slot)
                self.abandon()

    def copied(self, serial: int) -> None:
        """The taker has what this told of."""
        slot = self._told.pop(serial, None)
        if slot is not None:
            self._slots.free(slot)

    def abandon(self) -> None:
        """Nobody wants it any more, or can have it: what a taker still reads counts for nothing."""
        self._has_failed = True
        self._waiting.clear()
        for slot in self._told.values():
            self._slots.free(slot)
        self._told.clear()
