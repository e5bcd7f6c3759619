"""Moves pages between pools of one host that are mapped into each other's processes: one side copies, and the other
need do nothing.

Nothing is staged, because a copy of scattered pieces costs little more than one of a whole. A write to a peer whose
process has ended arrives in memory that nobody uses. That memory is unmapped as soon as no copy is in flight: until
then the peer's successor has less memory on its GPU.
"""

import logging
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from mini_infer_engine.kv_transfer.layout import (
    KVLayout,
    KVMemory,
    Pool,
    Span,
    head_shares,
    pieces,
    shares_to_read,
    shares_to_write,
)
from mini_infer_engine.kv_transfer.pool_digests import PoolDigests
from mini_infer_engine.kv_transfer.protocol.wire import RankAddress, TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.topology.locality import place_of_this_process
from mini_infer_engine.kv_transfer.topology.mapped_memory import IsDone, MappedMemory, Mapping, SharedPool
from mini_infer_engine.kv_transfer.transport import Digest, How, Motion, Motions, Progress, TransportError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    layout: KVLayout
    where: TransportAddress
    pools: dict[int, tuple[SharedPool, Mapping]] = field(default_factory=dict)
    """The mapped pools, by rank of the peer."""
    moving: list["_Copying"] = field(default_factory=list)
    """Copies from or to the peer, of which some may have ended."""

    @property
    def is_still(self) -> bool:
        """True if no copy from or to the peer is in flight."""
        return all(motion.progress() != "busy" for motion in self.moving)

    def moves(self, motion: "_Copying") -> None:
        """Adds a copy, and forgets those that have ended, for a peer may stay for weeks."""
        self.moving = [*(earlier for earlier in self.moving if earlier.progress() == "busy"), motion]

    def close(self) -> None:
        for _, mapping in self.pools.values():
            mapping.close()


class MappedTransport:
    """Implements `transport.Transport` by copies to and from mapped memory."""

    def __init__(self, mapped: MappedMemory, memory: KVMemory, rank: int = 0) -> None:
        """Creates a transport without peers. `mapped` covers the pool `memory`."""
        self.name: str = mapped.shared.kind
        self._mapped, self._memory, self._rank = mapped, memory, rank
        self._place = place_of_this_process()
        self._digests = PoolDigests(memory, rank)
        self._peers: dict[str, _Peer] = {}
        self._leaving: list[_Peer] = []
        """Removed peers from or to which copies are still in flight."""

    def enter_thread(self) -> None:
        """Prepares the thread for copies."""
        self._mapped.enter_thread()
        self._digests.prepare()

    def describe(self) -> TransportAddress:
        """Returns the pool's handle."""
        memory = self._memory
        here = RankAddress(
            metadata=b"",
            address=memory.address,
            device=memory.device,
            device_index=memory.device_index,
            place=self._place,
            shared=self._mapped.shared,
        )
        return TransportAddress(self.name, [here])

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """Maps the peer's pools. Raises TransportError if they have another dtype, or are not on this host."""
        earlier = self._peers.get(engine_id)
        if earlier is not None and (earlier.layout, earlier.where) == (layout, where):
            return
        self.remove_peer(engine_id)
        if layout.dtype != self._memory.layout.dtype:
            ours = self._memory.layout.dtype
            raise TransportError(f"{self.name} does not convert {ours} here and {layout.dtype} there: use nixl")
        peer = self._peers[engine_id] = _Peer(layout, where)
        try:
            for share in head_shares(self._memory.layout, self._rank, layout):
                pool = self._reachable(engine_id, where.ranks[share.their_rank])
                peer.pools[share.their_rank] = pool, self._mapped.open(pool)
        except TransportError:
            self.remove_peer(engine_id)
            raise

    def _reachable(self, engine_id: str, there: RankAddress) -> SharedPool:
        pool = there.shared
        if pool is None or pool.kind != self._mapped.shared.kind:
            raise TransportError(f"{engine_id} does not share its pages by {self.name}")
        if not pool.process.is_near:
            raise TransportError(f"{engine_id} is on another host, or in a container that does not see this one's IPC")
        if not pool.process.is_alive:
            raise TransportError(f"the process of {engine_id} has ended")
        if not 0 <= pool.offset <= pool.offset + pool.pool_bytes <= pool.size:
            raise TransportError(f"{engine_id} describes a pool that is larger than its memory")
        return pool

    def remove_peer(self, engine_id: str) -> None:
        """Removes a peer, whose pools are unmapped once no copy is in flight."""
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            self._leaving.append(peer)
            self._close_still()

    def reaches(self, engine_id: str) -> bool:
        """Returns True if the peer's pools are mapped here."""
        return engine_id in self._peers

    def tend(self) -> None:
        """Removes peers whose processes have ended, and unmaps pools without copies in flight."""
        for engine_id, peer in list(self._peers.items()):
            if not all(pool.process.is_alive for pool, _ in peer.pools.values()):
                log.info("the process of %s has ended: its memory is unmapped", engine_id)
                self.remove_peer(engine_id)
        self._close_still()

    def _close_still(self) -> None:
        for peer in [peer for peer in self._leaving if peer.is_still]:
            self._leaving.remove(peer)
            peer.close()

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """Begins to copy between our pool and the peer's mapped pools."""
        peer = self._peers.get(engine_id)
        if peer is None:
            raise TransportError(f"{engine_id} is not connected")
        ours, begun = self._memory.layout, list[Motion]()
        for share in (shares_to_write if how == "write" else shares_to_read)(ours, self._rank, peer.layout):
            pool, mapping = peer.pools[share.their_rank]
            table = pieces(ours, peer.layout, span, share)
            size = int(table[0, 2]) if len(table) else 0
            _check(table[:, 0], size, self._memory.size)
            _check(table[:, 1], size, pool.pool_bytes)
            addresses = table[:, :2] + (self._memory.address, mapping.address)
            is_done = self._mapped.copy(addresses if how == "write" else addresses[:, ::-1], size)
            motion = _Copying(is_done, size * len(table))
            peer.moves(motion)
            begun.append(motion)
        return begun[0] if len(begun) == 1 else Motions(begun)

    def staging_area(self, engine_id: str, span: Span) -> Area | None:
        """Returns None: nothing is staged."""
        del engine_id, span
        return None

    def slot_bytes(self, engine_id: str, area: Area, pool: Pool = "pages") -> int:
        """Raises TransportError: there are no staging buffers."""
        del pool
        self._refuse(engine_id, area)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Raises TransportError: there are no staging buffers."""
        del slot, span
        self._refuse(engine_id, area)

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """Raises TransportError: there are no staging buffers."""
        del slot, their_slot, span
        self._refuse(engine_id, area)

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Raises TransportError: there are no staging buffers."""
        del slot, span
        self._refuse(engine_id, area)

    def _refuse(self, engine_id: str, area: Area) -> NoReturn:
        raise TransportError(f"{engine_id} stages in its {area}'s memory, and {self.name} has no staging buffers")

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        """Begins to compute the digest of tokens in our pool."""
        return self._digests.begin(span, consumer)

    def close(self) -> None:
        """Removes all peers. Copies in flight are left alone, because the process ends."""
        for engine_id in list(self._peers):
            self.remove_peer(engine_id)


def _check(offsets: np.ndarray, size: int, pool_bytes: int) -> None:  # offsets [pieces] int64
    """Raises TransportError if a piece is outside its pool: the other engine sends page ids, which may be wrong."""
    if len(offsets) and not 0 <= int(offsets.min()) <= int(offsets.max()) + size <= pool_bytes:
        raise TransportError(f"pages up to byte {int(offsets.max()) + size} are requested, of a pool of {pool_bytes}")


class _Copying:
    def __init__(self, is_done: IsDone, num_bytes: int) -> None:
        self._is_done, self.num_bytes = is_done, num_bytes
        self._end: Progress = "busy"

    def progress(self) -> Progress:
        """Returns `done` once the copy has ended; it cannot fail."""
        if self._end == "busy" and self._is_done():
            self._end = "done"
        return self._end
