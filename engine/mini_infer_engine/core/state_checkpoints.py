"""Tracks which checkpoints of recurrent state exist: one slot for the state after a block of a prompt.

The state of recurrent layers cannot be cut as pages can: a prefix is resumed only where its state was kept. Knows keys
and slot numbers; the memory of slots is the runner's, and which states are worth keeping the manager's decision.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.core.page_allocator import PageAllocator


@dataclass(slots=True, frozen=True, eq=False)
class Checkpoint:
    """A state in a slot. Another state that the slot gets later is another object, even if it has the same key."""

    key: bytes
    """The key of the block that it follows."""
    slot: int


class StateCheckpoints:
    """Checkpoints by the key of the block that they follow, in slots of which unused ones are evicted in LRU order.

    It is the store's `Contents`: a slot without users keeps its state as long as a key leads to it.
    """

    def __init__(self, num_slots: int) -> None:
        self._store = PageAllocator(num_slots, BLOCK_SIZE_TOKENS, self)
        self._by_key: dict[bytes, Checkpoint] = {}
        self._in_slot: dict[int, Checkpoint] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_slots(self) -> int:
        """All slots."""
        return self._store.num_pages

    @property
    def num_taken(self) -> int:
        """Slots whose checkpoints got a user, or were evicted, since the start."""
        return self._store.num_taken

    @property
    def num_free(self) -> int:
        """Slots that `reserve` can return."""
        return self._store.num_free

    def in_slot(self, slot: int) -> Checkpoint | None:
        """Returns the checkpoint that a key leads to in a slot, or None."""
        return self._in_slot.get(slot)

    def least_recently_used(self, count: int) -> list[Checkpoint]:
        """Returns up to `count` checkpoints without users, the one that is evicted first first."""
        return [self._in_slot[slot] for slot in self._store.least_recently_used(count)]

    @property
    def num_in_use(self) -> int:
        """Slots that sequences are reading or writing."""
        return self._store.num_pages - self._store.num_free

    def longest(self, keys: Items[bytes], count: int, alignment: int) -> int:
        """Returns the most blocks up to `count`, a multiple of `alignment`, after which there is a checkpoint."""
        ends = range(count - count % alignment, 0, -alignment)
        return next((end for end in ends if keys[end - 1] in self._by_key), 0)

    def acquire(self, key: bytes) -> int:
        """Returns the slot of a checkpoint, which is not evicted before `release`."""
        slot = self._by_key[key].slot
        self._store.acquire(slot)
        return slot

    def share(self, slot: int) -> int:
        """Adds a user to a slot that has one. Returns the slot."""
        self._store.acquire(slot)
        return slot

    def touch(self, key: bytes) -> None:
        """Makes a checkpoint the last to be evicted, if nothing uses it."""
        self._store.touch(self._by_key[key].slot)

    def reserve(self) -> int | None:
        """Returns a slot for a new checkpoint, whose user the caller is; None if all slots have users."""
        return self._store.allocate() if self._store.num_free else None

    def publish(self, slot: int, key: bytes) -> bool:
        """Ends the use of a reserved slot, whose state can be resumed under this key from now on.

        Returns False if there is a checkpoint under the key already: the slot becomes blank.
        """
        if is_new := key not in self._by_key:
            self._by_key[key] = self._in_slot[slot] = Checkpoint(key, slot)
        self._store.release(slot)
        return is_new

    def release(self, slot: int) -> None:
        """Ends a use of a slot that `acquire` or `reserve` began."""
        self._store.release(slot)

    def forget(self, key: bytes) -> None:
        """Removes the checkpoint under a key, if there is one. Sequences that read it are not affected."""
        if (found := self._by_key.pop(key, None)) is not None:
            del self._in_slot[found.slot]
            if not self._store.references[found.slot]:  # it goes through the store so that it becomes blank
                self._store.acquire(found.slot)
                self._store.release(found.slot)

    def clear(self) -> None:
        """Forgets all checkpoints."""
        for key in list(self._by_key):
            self.forget(key)

    def retains(self, page: int) -> bool:
        """Implements `Contents`: a slot is kept as long as a key leads to it."""
        return page in self._in_slot

    def evict(self, page: int) -> None:
        """Implements `Contents`: the slot is about to get a new state."""
        if (found := self._in_slot.pop(page, None)) is not None:
            del self._by_key[found.key]
