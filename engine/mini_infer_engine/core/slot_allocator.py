"""Allocates the slots of running sequences. Knows numbers alone.

Other engines read and write the recurrent state at a slot, as they do the pages of a sequence. Such a slot is pinned:
it is not reused before the transfer has ended, whatever becomes of its sequence.
"""

from collections import Counter


class SlotAllocator:
    """The slots [0, num_slots), of which the one that was released last is allocated first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins: Counter[int] = Counter()
        self._released: set[int] = set()
        """Pinned slots that no sequence has any more."""

    @property
    def num_free(self) -> int:
        """Slots that can be allocated."""
        return len(self._free)

    @property
    def has_pins(self) -> bool:
        """True if a transfer reads or may write the state at a slot."""
        return self._pins.total() > 0

    @property
    def are_all_kept_out(self) -> bool:
        """True if no sequence has a slot, and none can get one before a transfer ends."""
        return len(self._released) == self.num_slots

    def allocate(self) -> int:
        """Returns a free slot. There must be one."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Frees a slot of a sequence, now or when it is no longer pinned."""
        if self._pins[slot]:
            self._released.add(slot)
        else:
            self._free.append(slot)

    def pin(self, slot: int) -> None:
        """Retains a slot for a transfer. It may be pinned several times."""
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Ends what one `pin` began."""
        self._pins[slot] -= 1
        if not self._pins[slot] and slot in self._released:
            self._released.remove(slot)
            self._free.append(slot)
