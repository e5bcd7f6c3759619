"""Writes tokens to one consumer through staging slots: gathers them in ours, and writes them to slots that it lends.

Several slots are in use at once, so that the next part is gathered while the one before it is in flight. The producer
writes because reads over TCP are half as fast. A staged write is polled like any `Motion`; it knows neither leases nor
the scheduler.
"""

import itertools
import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from mini_infer_engine.kv_transfer.layout import Span
from mini_infer_engine.kv_transfer.staging_slots import SLOTS_PER_DIRECTION, Slots
from mini_infer_engine.kv_transfer.transport import Motion, Progress, TransportError

log = logging.getLogger(__name__)

_SLOTS_EACH = SLOTS_PER_DIRECTION - 2
"""The most slots that one staged write uses. Each slot takes the threads of both sides a few turns, of which each may
wait for the interpreter's lock, so several are in flight; some are left for writes to other consumers. (Measured with
CPU engines, 1,500 tokens in 96 slots: 52 ms more than without a transfer with two slots, 37 with four, 28 with eight.)
"""

_FEW_PARTS = 3
"""With fewer parts in flight than this, a slot is sent even if it is not full. A slot costs the threads of both sides
the same number of turns however full it is.
"""


class Channel(Protocol):
    """The connection of a staged write to its consumer."""

    def divide(self, span: Span) -> list[Span]:
        """Divides a span into parts that fill a slot each. Raises ValueError if no slot is large enough."""

    def stage(self, slot: int, part: Span) -> Motion:
        """Begins to gather a part into a slot of ours. Raises TransportError if it cannot begin."""

    def request_slot(self, serial: int) -> None:
        """Requests a slot of the consumer for the part of this serial number."""

    def write(self, slot: int, their_slot: int, part: Span) -> Motion:
        """Begins to write from a slot of ours to one of the consumer's. Raises TransportError if it cannot begin."""

    def report_written(self, serial: int, part: Span) -> None:
        """Reports to the consumer that a part has been written."""


@dataclass(slots=True)
class _Part:
    """A part in flight."""

    span: Span
    slot: int
    filling: Motion | None
    """The gathering into our slot, or None once the slot is full."""
    their_slot: int | None = None
    """The consumer's slot, or None if it has not lent one yet."""
    writing: Motion | None = None


class StagedWrite:
    """A write of tokens through staging slots, which is polled as a `Motion`."""

    def __init__(self, span: Span, channel: Channel, slots: Slots, serials: "itertools.count[int]") -> None:
        """Divides the span into parts. Raises ValueError if no slot is large enough for one."""
        self._channel, self._slots, self._serials = channel, slots, serials
        self._waiting = deque(channel.divide(span))
        self._parts: dict[int, _Part] = {}
        """Parts in flight, by serial number."""
        self._has_failed = False
        self.num_bytes = 0

    def add(self, span: Span, *, is_last: bool) -> bool:
        """Adds tokens to a write that is still `busy`. Returns False if they do not fill a slot yet and enough parts
        are in flight: the caller offers them again later.
        """
        parts = self._channel.divide(span)
        if len(parts) == 1 and len(self._waiting) + len(self._parts) >= _FEW_PARTS and not is_last:
            return False
        if not self._has_failed:
            self._waiting.extend(parts)
            self._fill()
        return True

    def grant_slot(self, serial: int, slot: int) -> None:
        """Accepts a slot of the consumer for a part. It is ignored if the part has ended."""
        part = self._parts.get(serial)
        if part is not None and part.their_slot is None:
            part.their_slot = slot

    def progress(self) -> Progress:
        """Polls all parts, and begins new ones. After `done` or `failed`, nothing reads our pages or writes to the
        peer's slots.
        """
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
        """Advances a part by a stage if it can. Returns True if the part is no longer in flight."""
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
            self._channel.report_written(serial, part.span)
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
                self._channel.request_slot(serial)

    def abandon(self) -> None:
        """Cancels the write: no new part begins, and those in flight end by themselves."""
        self._has_failed = True
        self._waiting.clear()
