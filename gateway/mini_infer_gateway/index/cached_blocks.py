"""The blocks that one endpoint reports as cached: a tree of blocks under our own keys, made for few and short accesses.

A cache contains a prompt from its beginning on, so bisection finds the cached length of a prompt. Forks are stored by
run (an unforked part of a chain), so the part that conversations share is found without a walk. Blocks are rows of
columns, not objects: a million objects would slow the garbage collector. A block may have copies in several tiers (the
device, main memory, a disk): each run counts the blocks whose fastest copy is not on the device. Pure: no clock.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from msgspec import Struct

from mini_infer_contract.events import BlockHash
from mini_infer_gateway.index.key_chain import Lookup

ROOT = -1
"""The parent of a prompt's first block."""
DEVICE, HOST, DISK = 1, 2, 4
"""Bits of the tiers in which a block has a copy, the fastest first."""


class Hit(Struct, frozen=True, gc=False):
    """The cached part of one prompt at an endpoint."""

    blocks: int
    """Number of cached blocks from the first on, without a gap."""
    shared_blocks: int
    """Number of these blocks that are also the beginning of other prompts cached there."""
    sharers: int
    """Number of continuations of the shared part."""
    host_blocks: int = 0
    """Number of these blocks whose fastest copy is in main memory."""
    disk_blocks: int = 0
    """Number of these blocks whose only copy is on a disk."""

    def cut(self, blocks: int) -> "Hit":
        """Returns the hit without the blocks after the first `blocks`; the slowest tiers are cut first."""
        if self.blocks <= blocks:
            return self
        disk = max(0, self.disk_blocks - (self.blocks - blocks))
        host = min(self.host_blocks, blocks - disk)
        return Hit(blocks, self.shared_blocks, self.sharers, host, disk)


NO_HIT = Hit(0, 0, 1)


class Conversation(NamedTuple):
    """One cached chain of blocks that no other continues."""

    used_s: float
    """The time of its last use, as `CachedBlocks.now_s` told it."""
    forks: list[tuple[bytes, int]]
    """The key and number of blocks of the whole chain, then of each prefix of it that other chains share."""


class CachedBlocks:
    """The blocks of an endpoint that its events have confirmed."""

    def __init__(self) -> None:
        self.by_hash: dict[BlockHash, int] = {}
        """Rows by the sender's hash."""
        self.owner: dict[bytes, int] = {}
        """Row of the block that ends with each of our keys."""
        self.step = 1
        """Number of our blocks in the smallest run of whole blocks of the sender that ends with one of ours."""
        self._rests: dict[int, tuple[int, ...]] = {}
        """Token ids after a row's key, by row; empty if the sender's block size is a multiple of ours."""
        self.now_s = 0.0
        """The time that uses are recorded with; its owner sets it at intervals."""
        self._leaves: OrderedDict[int, float] = OrderedDict()
        """Rows without children, the least recently used first, with the times of their last use."""
        self._ghosts: set[int] = set()
        """Rows that were removed although they had children. A prompt may have a gap then, so lookups walk."""
        self._keys: list[bytes] = []
        self._hashes: list[BlockHash | None] = []
        self._parents, self._children = array("i"), array("i")
        self._depths, self._runs = array("i"), array("i")
        self._tiers = array("B")
        """The tiers in which a row's block has copies; 0 for rows of removed blocks."""
        self._free_rows: list[int] = []
        self._run_above, self._run_end = array("i"), array("i")
        """The parent block of each run, and its last block."""
        self._run_host, self._run_disk = array("i"), array("i")
        """Numbers of our blocks in each run whose fastest copy is in main memory, and on a disk."""
        self._slow_rows = 0
        """Number of rows without a copy on the device: while it is 0, no lookup reads tiers."""
        self._free_runs: list[int] = []

    def __len__(self) -> int:
        return max(len(self.owner), len(self.by_hash))

    def end_of(self, row: int) -> tuple[bytes, tuple[int, ...]]:
        """Returns our last key at or before a block's end, and the token ids after it."""
        return self._keys[row], self._rests.get(row, ())

    def add(
        self, block_hash: BlockHash, parent: int, key: bytes, keys: int, rest: tuple[int, ...], tier: int = DEVICE
    ) -> int:
        """Adds a copy of a block under the row `parent`, with `keys` more keys, the last of which is `key`. Returns its
        row.
        """
        known = self.by_hash.get(block_hash)
        if known is not None:
            if self._keys[known] == key and self._rests.get(known, ()) == rest:
                if not self._tiers[known] & tier:
                    self._set_tiers(known, self._tiers[known] | tier)
                return known
            if known == parent:
                return parent  # A block cannot hang on itself, whatever its sender says.
            self.drop(block_hash)
        row = self._new_row(block_hash, parent, key, keys)
        if tier == DEVICE:
            self._tiers[row] = DEVICE
        else:
            self._set_tiers(row, tier)
        self.by_hash[block_hash] = row
        if rest:
            self._rests[row] = rest
        elif keys:
            self.owner[key] = row
        return row

    def used(self, row: int) -> None:
        """Marks the end of a chain as most recently used, because it was stored or looked up."""
        if row != ROOT and not self._children[row]:
            self._leaves[row] = self.now_s
            self._leaves.move_to_end(row)

    def conversations(self, most: int, most_forks: int) -> Iterator[Conversation]:
        """Yields at most `most` conversations, the most recently used first, with at most `most_forks` forks in all. No
        block may change meanwhile.
        """
        for row, used_s in islice(reversed(self._leaves.items()), most):
            forks: list[tuple[bytes, int]] = []
            while row != ROOT and len(forks) < most_forks:
                forks.append((self._keys[row], self._depths[row]))
                row = self._run_above[self._runs[row]]
            if row != ROOT:
                return
            most_forks -= len(forks)
            yield Conversation(used_s, forks)

    def run_end(self, key: bytes) -> bytes | None:
        """Returns the last key of the unforked run of blocks that has this key; None if no block has it."""
        row = self.owner.get(key)
        return None if row is None else self._keys[self._run_end[self._runs[row]]]

    def add_copies(self, hashes: Sequence[BlockHash], tier: int) -> int:
        """Adds a copy of each of these blocks, up to the first unknown one. Returns the number of known ones."""
        for position, block_hash in enumerate(hashes):
            row = self.by_hash.get(block_hash)
            if row is None:
                return position
            if not self._tiers[row] & tier:
                self._set_tiers(row, self._tiers[row] | tier)
        return len(hashes)

    def drop_copy(self, block_hash: BlockHash, tier: int) -> None:
        """Removes a block's copy in one tier, and the block with its last copy; unknown ones are ignored."""
        row = self.by_hash.get(block_hash)
        if row is None:
            return
        if left := self._tiers[row] & ~tier:
            self._set_tiers(row, left)
        else:
            self.drop(block_hash)

    def drop(self, block_hash: BlockHash) -> None:
        """Removes a block with all its copies; unknown ones are ignored."""
        row = self.by_hash.pop(block_hash, None)
        if row is None:
            return
        if self._tiers[row] & DEVICE:
            self._tiers[row] = 0
        else:
            self._set_tiers(row, 0)
        if self.owner.get(self._keys[row]) == row:
            del self.owner[self._keys[row]]
        self._leaves.pop(row, None)
        if self._children[row]:
            self._ghosts.add(row)
        else:
            self._release(row)

    def evict(self, blocks: int) -> None:
        """Drops this many blocks from the ends of the least recently used conversations."""
        while blocks > 0 and self._leaves:
            row, _ = self._leaves.popitem(last=False)
            while blocks > 0 and row != ROOT and not self._children[row] and row not in self._ghosts:
                parent, block_hash = self._parents[row], self._hashes[row]
                assert block_hash is not None
                self.drop(block_hash)
                blocks -= 1
                row = parent
            if row != ROOT and not self._children[row] and row not in self._ghosts:
                self._become_first_leaf(row)
        while blocks > 0 and self.by_hash:  # Leaves that lost their parents' rows are not listed.
            self.drop(next(iter(self.by_hash)))
            blocks -= 1

    def hit(self, keys: Lookup) -> Hit:
        """Returns the cached part of a prompt with these keys, and the part of it that other prompts share."""
        owner, step = self.owner, self.step
        if self._ghosts:
            blocks = self._walk(keys)
        else:
            blocks = step * keys.deepest(owner.__contains__, 0, keys.length // step, step)
        if not blocks:
            return NO_HIT
        row, shared_blocks, sharers = owner[keys.last_of(blocks)], 0, 1
        host, disk = self._slow_blocks(keys, row, blocks) if self._slow_rows else (0, 0)
        while row != ROOT:
            children = self._children[row]
            if children > 1 and row not in self._ghosts:
                shared_blocks, sharers = max(shared_blocks, self._depths[row]), max(sharers, children)
            row = self._run_above[self._runs[row]]
        return Hit(blocks, min(blocks, shared_blocks), sharers, host, disk)

    def touch(self, keys: Lookup) -> int:
        """Marks a prompt as used, and returns the number of its cached blocks."""
        blocks = self.hit(keys).blocks
        if blocks:
            self.used(self.owner[keys.last_of(blocks)])
        return blocks

    def sweep(self, blocks: int) -> int:
        """Frees the memory of about this many blocks of a discarded tree. Returns the number of entries left."""
        for _ in range(min(blocks, len(self.by_hash))):
            self.by_hash.popitem()
        for _ in range(min(blocks, len(self.owner))):
            self.owner.popitem()
        del self._keys[-blocks:], self._hashes[-blocks:]
        return len(self.by_hash) + len(self.owner) + len(self._keys)

    def _walk(self, keys: Lookup) -> int:
        blocks = 0
        while blocks + self.step <= keys.length and keys.last_of(blocks + self.step) in self.owner:
            blocks += self.step
        return blocks

    def _slow_blocks(self, keys: Lookup, row: int, blocks: int) -> tuple[int, int]:
        """Returns how many of a hit's blocks, which end with `row`, are fastest in main memory, and on a disk."""
        if self._ghosts:  # Rows above this one may be removed, and their keys belong to other rows.
            rows = (self.owner[keys.last_of(end)] for end in range(self.step, blocks + 1, self.step))
            fastest = [self._tiers[one] & -self._tiers[one] for one in rows]
            return self.step * fastest.count(HOST), self.step * fastest.count(DISK)
        host, disk = self._slow_below(row)
        host, disk = -host, -disk
        while row != ROOT:
            run = self._runs[row]
            host += self._run_host[run]
            disk += self._run_disk[run]
            row = self._run_above[run]
        return host, disk

    def _slow_below(self, row: int) -> tuple[int, int]:
        """Counts the same in the rest of this row's run, after the row."""
        run, host, disk = self._runs[row], 0, 0
        if self._run_host[run] or self._run_disk[run]:
            below = self._run_end[run]
            while below != row:
                if not (tiers := self._tiers[below]) & DEVICE:
                    blocks = self._depths[below] - self._depths[self._parents[below]]
                    host, disk = (host + blocks, disk) if tiers & HOST else (host, disk + blocks)
                below = self._parents[below]
        return host, disk

    def _set_tiers(self, row: int, tiers: int) -> None:
        """Sets where a block has copies (0: nowhere), in its row and in the counts of its run."""
        before, self._tiers[row] = self._tiers[row], tiers
        self._count(row, before, -1)
        self._count(row, tiers, 1)

    def _count(self, row: int, tiers: int, sign: int) -> None:
        if tiers & DEVICE or not tiers:
            return
        run, parent = self._runs[row], self._parents[row]
        blocks = self._depths[row] - (self._depths[parent] if parent != ROOT else 0)
        column = self._run_host if tiers & HOST else self._run_disk
        column[run] += sign * blocks
        self._slow_rows += sign

    def _new_row(self, block_hash: BlockHash, parent: int, key: bytes, keys: int) -> int:
        depth = keys + (self._depths[parent] if parent != ROOT else 0)
        run = self._run_under(parent)
        if self._free_rows:
            row = self._free_rows.pop()
            self._keys[row], self._hashes[row] = key, block_hash
            self._parents[row], self._children[row] = parent, 0
            self._depths[row], self._runs[row] = depth, run
        else:
            row = len(self._keys)
            self._keys.append(key)
            self._hashes.append(block_hash)
            self._parents.append(parent)
            self._children.append(0)
            self._depths.append(depth)
            self._runs.append(run)
            self._tiers.append(0)
        self._run_end[run] = row
        if parent != ROOT:
            self._children[parent] += 1
            self._leaves.pop(parent, None)
        return row

    def _run_under(self, parent: int) -> int:
        """Returns the run of a new block: that of its parent if it is the parent's first child, else a new one."""
        if parent == ROOT:
            return self._new_run(ROOT)
        run = self._runs[parent]
        if not self._children[parent] and self._run_end[run] == parent:
            return run
        if self._run_end[run] != parent:
            self._split(run, parent)
        return self._new_run(parent)

    def _split(self, run: int, last: int) -> None:
        """Splits a run after the block `last`: the upper part becomes a run of its own, the parent of the rest."""
        upper = self._new_run(self._run_above[run])
        self._run_end[upper], self._run_above[run] = last, last
        row = last
        has_slow = self._run_host[run] or self._run_disk[run]
        while row != ROOT and self._runs[row] == run:
            if has_slow:
                self._count(row, self._tiers[row], -1)
            self._runs[row] = upper
            if has_slow:
                self._count(row, self._tiers[row], 1)
            row = self._parents[row]

    def _new_run(self, above: int) -> int:
        if self._free_runs:
            run = self._free_runs.pop()
            self._run_above[run] = above
            return run
        self._run_above.append(above)
        self._run_end.append(ROOT)
        self._run_host.append(0)
        self._run_disk.append(0)
        return len(self._run_above) - 1

    def _release(self, row: int) -> None:
        """Frees a row without children, and removed rows above it that were kept only for its sake."""
        while True:
            run, parent = self._runs[row], self._parents[row]
            self._hashes[row] = None
            self._rests.pop(row, None)
            self._ghosts.discard(row)
            self._free_rows.append(row)
            if self._run_end[run] == row:
                if parent != ROOT and self._runs[parent] == run:
                    self._run_end[run] = parent
                else:
                    self._free_runs.append(run)
            if parent == ROOT:
                return
            self._children[parent] -= 1
            if self._children[parent]:
                return
            if parent not in self._ghosts:
                self._become_first_leaf(parent)
                return
            row = parent

    def _become_first_leaf(self, row: int) -> None:
        """Makes a row without children the least recently used leaf."""
        self._leaves[row] = next(iter(self._leaves.values()), self.now_s)
        self._leaves.move_to_end(row, last=False)
