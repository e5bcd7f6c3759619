"""What is given to one taker through staging slots: gathered in ours, written to one that it lends, which it empties.

Several slots are in use at once, so that the next part is gathered while the one before it is on its way. It is the
side that gives which writes: over TCP a peer would read half as fast. It is polled as any `Motion`; it knows neither
leases nor the scheduler.
"""

import itertools
import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from mini_infer_engine.kv_transfer.layout import Span
from mini_infer_engine.kv_transfer.staging_slots import SLOTS_EACH_WAY, Slots
from mini_infer_engine.kv_transfer.transport import Motion, Progress, TransportError

log = logging.getLogger(__name__)

_SLOTS_EACH = SLOTS_EACH_WAY - 2
"""At most, of one gift: each takes the threads of both sides a few turns, of which each may wait for the interpreter's
lock, so that several are on their way; gifts to other takers find slots, too. (CPU engines, 1,500 tokens in 96 slots:
52 ms more than without a transfer with two, 37 with four, 28 with eight.)"""

_FEW_PARTS = 3
"""With fewer on their way a slot goes as it is. Each takes both sides' threads some turns, however full it is."""


class Channel(Protocol):
    """To one taker."""

    def divide(self, span: Span) -> list[Span]:
        """Into parts of a slot each. ValueError: no slot is large enough."""

    def stage(self, slot: int, part: Span) -> Motion:
        """Begin to fill a slot of ours. TransportError."""

    def ask(self, serial: int) -> None:
        """Have the taker lend a slot for the part of this serial number."""

    def write(self, slot: int, their_slot: int, part: Span) -> Motion:
        """Begin to write from a slot of ours to one of the taker's. TransportError."""

    def tell(self, serial: int, part: Span) -> None:
        """Say to the taker that it is there."""


@dataclass(slots=True)
class _Part:
    """On its way."""

    span: Span
    slot: int
    filling: Motion | None
    """None: the slot is full."""
    their_slot: int | None = None
    """None: none has been lent yet."""
    writing: Motion | None = None


class StagedGift:
    """See the module and `Motion`."""

    def __init__(self, span: Span, channel: Channel, slots: Slots, serials: "itertools.count[int]") -> None:
        """ValueError: see `Channel.divide`."""
        self._channel, self._slots, self._serials = channel, slots, serials
        self._waiting = deque(channel.divide(span))
        self._parts: dict[int, _Part] = {}
        """By serial number."""
        self._has_failed = False
        self.num_bytes = 0

    def add(self, span: Span, *, is_last: bool) -> bool:
        """More, while `progress` says that it is busy. False: it fills no slot yet, and enough is on its way."""
        parts = self._channel.divide(span)
        if len(parts) == 1 and len(self._waiting) + len(self._parts) >= _FEW_PARTS and not is_last:
            return False
        if not self._has_failed:
            self._waiting.extend(parts)
            self._fill()
        return True

    def lend(self, serial: int, slot: int) -> None:
        """The taker has a slot for a part. Of one that is over, nothing is written there."""
        part = self._parts.get(serial)
        if part is not None and part.their_slot is None:
            part.their_slot = slot

    def progress(self) -> Progress:
        """See `Motion.progress`. `failed`, as `done`: neither are pages read any more nor lent slots written to."""
        for serial, part in list(self._parts.items()):
            try:
                has_ended = self._has_ended(serial, part)
            except Exception:
                log.exception("a part of what another engine is given cannot be moved")
                self.abandon()
                has_ended = True
            if has_ended:
                self._slots.free(self._parts.pop(serial).slot)
        self._fill()
        if self._parts:
            return "busy"
        if self._has_failed:
            return "failed"
        return "busy" if self._waiting else "done"

    def _has_ended(self, serial: int, part: _Part) -> bool:
        """Whether this part is on its way no more."""
        if part.filling is not None:
            found = part.filling.progress()
            if found == "busy":
                return False
            part.filling = None
            if found == "failed":
                self.abandon()
        if part.writing is None:
            if self._has_failed or part.their_slot is None:
                return self._has_failed
            try:
                part.writing = self._channel.write(part.slot, part.their_slot, part.span)
            except TransportError:
                self.abandon()
                return True
        found = part.writing.progress()
        if found == "failed":
            self.abandon()
        elif found == "done":
            self.num_bytes += part.writing.num_bytes
            self._channel.tell(serial, part.span)
        return found != "busy"

    def _fill(self) -> None:
        while self._waiting and len(self._parts) < _SLOTS_EACH and not self._has_failed:
            slot = self._slots.take()
            if slot is None:
                return
            span, serial = self._waiting.popleft(), next(self._serials)
            try:
                self._parts[serial] = _Part(span, slot, self._channel.stage(slot, span))
            except Exception as error:
                if not isinstance(error, TransportError):
                    log.exception("a part of what another engine is given cannot be staged")
                self._slots.free(slot)
                self.abandon()
            else:
                self._channel.ask(serial)

    def abandon(self) -> None:
        """Nobody wants it any more, or can have it: what has begun to move ends by itself."""
        self._has_failed = True
        self._waiting.clear()
