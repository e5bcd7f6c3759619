"""Tracks which checkpoints of recurrent state exist: one slot for the state after a block of a prompt.

The state of recurrent layers cannot be cut as pages can: a prefix is resumed only where its state was kept. Knows keys
and slot numbers; the memory of slots is the runner's, and which states are worth keeping the manager's decision.
"""

from collections.abc import Sequence as Items

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.core.page_allocator import PageAllocator


class StateCheckpoints:
    """Checkpoints by the key of the block that they follow, in slots of which unused ones are evicted in LRU order.

    It is the store's `Contents`: a slot without users keeps its state as long as a key leads to it.
    """

    def __init__(self, num_slots: int) -> None:
        self._store = PageAllocator(num_slots, BLOCK_SIZE_TOKENS, self)
        self._slots: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_in_use(self) -> int:
        """Slots that sequences are reading or writing."""
        return self._store.num_pages - self._store.num_free

    def longest(self, keys: Items[bytes], count: int, alignment: int) -> int:
        """Returns the most blocks up to `count`, a multiple of `alignment`, after which there is a checkpoint."""
        ends = range(count - count % alignment, 0, -alignment)
        return next((end for end in ends if keys[end - 1] in self._slots), 0)

    def acquire(self, key: bytes) -> int:
        """Returns the slot of a checkpoint, which is not evicted before `release`."""
        slot = self._slots[key]
        self._store.acquire(slot)
        return slot

    def share(self, slot: int) -> int:
        """Adds a user to a slot that has one. Returns the slot."""
        self._store.acquire(slot)
        return slot

    def touch(self, key: bytes) -> None:
        """Makes a checkpoint the last to be evicted, if nothing uses it."""
        self._store.touch(self._slots[key])

    def reserve(self) -> int | None:
        """Returns a slot for a new checkpoint, whose user the caller is; None if all slots have users."""
        return self._store.allocate() if self._store.num_free else None

    def publish(self, slot: int, key: bytes) -> bool:
        """Ends the use of a reserved slot, whose state can be resumed under this key from now on.

        Returns False if there is a checkpoint under the key already: the slot becomes blank.
        """
        if is_new := key not in self._slots:
            self._slots[key] = slot
            self._keys[slot] = key
        self._store.release(slot)
        return is_new

    def release(self, slot: int) -> None:
        """Ends a use of a slot that `acquire` or `reserve` began."""
        self._store.release(slot)

    def forget(self, key: bytes) -> None:
        """Removes the checkpoint under a key, if there is one. Sequences that read it are not affected."""
        if (slot := self._slots.pop(key, None)) is not None:
            del self._keys[slot]
            if not self._store.references[slot]:  # it goes through the store so that it becomes blank
                self._store.acquire(slot)
                self._store.release(slot)

    def clear(self) -> None:
        """Forgets all checkpoints."""
        for key in list(self._slots):
            self.forget(key)

    def retains(self, page: int) -> bool:
        """Implements `Contents`: a slot is kept as long as a key leads to it."""
        return page in self._keys

    def evict(self, page: int) -> None:
        """Implements `Contents`: the slot is about to get a new state."""
        if (key := self._keys.pop(page, None)) is not None:
            del self._slots[key]
