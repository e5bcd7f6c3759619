"""Pools that are mapped into each other's processes: what arrives where, what is refused, and peers that die."""

import gc
import os
import weakref
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVLayout, Span
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.topology.mapped_memory import IsDone
from mini_infer_engine.kv_transfer.topology.peer_process import this_process
from mini_infer_engine.kv_transfer.transport import TransportError
from mini_infer_engine.kv_transfer.transports.mapped_transport import MappedTransport
from mini_infer_engine.kv_transfer.transports.shared_memory import HostMemory, SharedArray
from tests.engine.kv_transfer.shared_pool import LAYOUT, SharedPool, pool_of_another_process

HALVED = replace(LAYOUT, num_heads=2, tp_size=2)


def meet(ours: SharedPool, *theirs: SharedPool, name: str = "theirs") -> None:
    [first, *others] = [pool.transport.describe() for pool in theirs]
    where = TransportAddress(first.transport, [*first.ranks, *(other.ranks[0] for other in others)])
    ours.transport.add_peer(name, theirs[0].layout, where)


def test_mapped_pages_of_another_process_are_written_and_read() -> None:
    ours = SharedPool()
    ours.pages[:] = np.arange(ours.pages.size).reshape(ours.pages.shape) + 1
    with pool_of_another_process() as (_, where):
        ours.transport.add_peer("held", LAYOUT, where)
        written = ours.transport.start("held", "write", Span([3, 1], [0, 2], 0, 32))
        assert written.progress() == "done"
        assert written.num_bytes == 2 * LAYOUT.page_bytes
        assert ours.transport.start("held", "write", Span([5], [4], 0, 16, (1, 2))).progress() == "done"
        expected = ours.pages[[3, 1, 5]].copy()
        ours.pages[:] = -1
        assert ours.transport.start("held", "read", Span([0, 1, 2, 6], [0, 2, 4, 7], 0, 64)).progress() == "done"
    assert (ours.pages[[0, 1]] == expected[:2]).all()
    assert (ours.pages[2, 0] == 4).all(), "a layer that nobody has written"
    assert (ours.pages[2, 1] == expected[2, 1]).all()
    assert (ours.pages[6] == 7).all()
    assert (ours.pages[[3, 4, 5, 7]] == -1).all()
    ours.transport.close()


def test_finished_copies_are_released() -> None:
    """A peer may stay for weeks, and each copy has an event of the GPU's."""
    ours, theirs = SharedPool(), SharedPool()
    meet(ours, theirs)
    motions = [ours.transport.start("theirs", "write", Span([0], [1], 0, 16)) for _ in range(5)]
    assert all(motion.progress() == "done" for motion in motions)
    kept = weakref.WeakSet(motions)
    del motions
    gc.collect()
    assert len(kept) <= 1, "the last one, until the next begins"


def test_a_killed_peers_memory_is_unmapped_without_harm() -> None:
    ours = SharedPool()
    with pool_of_another_process() as (process, where):
        ours.transport.add_peer("held", LAYOUT, where)
        ours.transport.tend()
        assert ours.transport.reaches("held")
        file = where.ranks[0].shared
        assert file is not None
        name = file.handle.decode().partition(" ")[2].removesuffix(" (deleted)")
        assert name in _maps()
        process.kill()
        process.wait()
        assert ours.transport.start("held", "write", Span([0], [0], 0, 16)).progress() == "done"
        ours.transport.tend()
        assert not ours.transport.reaches("held")
        assert name not in _maps()
        with pytest.raises(TransportError, match="not connected"):
            ours.transport.start("held", "write", Span([0], [0], 0, 16))
        with pytest.raises(TransportError, match="has ended"):
            ours.transport.add_peer("held", LAYOUT, where)


def _maps() -> str:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return maps.read()


class SlowCopies(HostMemory):
    """Copies that have ended when they are told to."""

    is_done = False

    def copy(self, pieces: np.ndarray, size: int) -> IsDone:
        super().copy(pieces, size)
        return lambda: self.is_done


def test_memory_stays_mapped_until_its_copies_end() -> None:
    ours, theirs = SharedPool(), SharedPool()
    slow = SlowCopies(ours.memory)
    transport = MappedTransport(slow, ours.memory)
    where = theirs.transport.describe()
    transport.add_peer("theirs", LAYOUT, where)
    [(_, mapping)] = transport._peers["theirs"].pools.values()
    closed: list[bool] = []
    mapping.close = lambda: closed.append(True)  # type: ignore[method-assign]
    motion = transport.start("theirs", "write", Span([0], [0], 0, 16))
    assert motion.progress() == "busy"
    transport.remove_peer("theirs")
    transport.tend()
    assert not closed
    slow.is_done = True
    assert motion.progress() == "done"
    transport.tend()
    assert closed == [True]


@pytest.mark.parametrize(
    ("changes", "message_part"),
    [
        ({"kind": "cuda-ipc"}, "share.*shm"),
        ({"process": replace(this_process(), domain="another host")}, "another host"),
        ({"process": replace(this_process(), domain="")}, "another host"),
        ({"process": replace(this_process(), started=1)}, "has ended"),  # its number is another process's now
        ({"pool_bytes": 1 << 40}, "larger than its memory"),
        ({"offset": -16}, "larger than its memory"),
        ({"size": 1 << 20}, "is not the memory"),
        ({"handle": b"1 /memfd:another (deleted)"}, "is not the memory"),
        ({"handle": b"999999 /memfd:x (deleted)"}, "same user"),
        ({"handle": b"nothing"}, "no handle"),
    ],
)
def test_a_peer_is_refused_when_its_memory_cannot_be_mapped(changes: dict[str, Any], message_part: str) -> None:
    ours, theirs = SharedPool(), SharedPool()
    where = theirs.transport.describe()
    [rank] = where.ranks
    assert rank.shared is not None
    reported = replace(where, ranks=[replace(rank, shared=replace(rank.shared, **changes))])
    with pytest.raises(TransportError, match=message_part):
        ours.transport.add_peer("theirs", LAYOUT, reported)
    assert not ours.transport.reaches("theirs")
    ours.transport.add_peer("theirs", LAYOUT, where)
    assert ours.transport.reaches("theirs")


def test_a_peer_is_refused_when_it_shares_no_memory_or_has_another_dtype() -> None:
    ours, theirs = SharedPool(), SharedPool()
    where = theirs.transport.describe()
    with pytest.raises(TransportError, match="does not share"):
        ours.transport.add_peer("a", LAYOUT, replace(where, ranks=[replace(where.ranks[0], shared=None)]))
    other: KVLayout = replace(LAYOUT, dtype="float32")
    with pytest.raises(TransportError, match="float32 there: use nixl"):
        ours.transport.add_peer("b", other, where)


def test_shared_memory_transport_is_refused_when_the_pool_is_not_shared() -> None:
    pool = SharedPool()
    for changes in ({"file": None}, {"device": "cuda"}):
        with pytest.raises(ModelError, match="--kv-transport shm"):
            HostMemory(replace(pool.memory, **changes))


def test_shared_memory_cannot_be_truncated() -> None:
    shared = SharedArray(1 << 16)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(shared.file, 16)
    assert not shared.bytes.any()
