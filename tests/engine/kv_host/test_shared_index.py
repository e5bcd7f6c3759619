"""Engines that share a pool see each other's pages, evict the least recently used of all, and survive each other."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from mini_infer_contract.events import BlockRemoved, BlockStored
from mini_infer_engine.kv_host.shared_index import FILLING, SharedHostIndex
from tests.engine.kv_host.pools import content_of, key_of, open_index, page_of, record_of, store


def test_page_is_hit_when_another_engine_has_stored_it(tmp_path: Path) -> None:
    one, other = open_index(tmp_path), open_index(tmp_path)
    slot = store(one, 1)
    assert key_of(1) not in other
    other.sync()
    assert other.acquire([key_of(1), key_of(2)]) == [slot, None]
    assert slot is not None
    assert np.array_equal(page_of(other, slot), content_of(1))
    assert other.record(slot).digest == record_of(1).digest  # type: ignore[union-attr]  # it has one
    assert store(other, 1) is not None  # it was stored by both at a time: the second copy is not kept
    assert (len(one), len(other), other.num_blank) == (1, 1, 7)


def test_least_recently_used_of_all_engines_is_evicted_first(tmp_path: Path) -> None:
    one, other = open_index(tmp_path, 4), open_index(tmp_path, 4)
    for number in range(4):
        store((one, other)[number % 2], number)
        time.sleep(1e-4)
    other.sync()
    other.release_all([page for page in other.acquire([key_of(0)]) if page is not None])
    for number in range(4, 6):
        store(other, number)
    one.sync()
    assert [number for number in range(6) if key_of(number) in one] == [0, 3, 4, 5]


def test_page_is_not_evicted_while_another_engine_uses_it(tmp_path: Path) -> None:
    one, other = open_index(tmp_path, 2), open_index(tmp_path, 2)
    store(one, 1), store(one, 2)
    other.sync()
    (used,) = other.acquire([key_of(1)])
    assert [store(one, number) for number in (3, 4)] == [1 - used, 1 - used]  # type: ignore[operator]  # it has a slot
    assert one.allocate(2) == [1 - used]  # type: ignore[operator]
    assert store(other, 5) is None


def test_page_is_a_miss_when_it_was_evicted_after_it_was_found(tmp_path: Path) -> None:
    one, other = open_index(tmp_path, 1), open_index(tmp_path, 1)
    slot = store(one, 1)
    other.sync()
    store(one, 2)
    assert other.page(key_of(1)) == slot
    assert other.acquire([key_of(1)]) == [None]
    other.sync()
    assert other.page(key_of(1)) is None
    assert other.acquire([key_of(2)]) == [slot]


def test_every_engine_emits_events_when_any_stores_or_evicts(tmp_path: Path) -> None:
    one, other = open_index(tmp_path, 1), open_index(tmp_path, 1)
    for number in (1, 2):
        store(one, number)
        other.sync()
    for index in (one, other):
        kinds = [(type(event), event.medium) for event in index.events.take()]
        assert kinds == [(BlockStored, "CPU"), (BlockRemoved, "CPU"), (BlockStored, "CPU")]
    assert len(other.events.snapshot(other.records)) == 1


def test_bad_page_and_cleared_pages_are_gone_for_all_engines(tmp_path: Path) -> None:
    one, other = open_index(tmp_path), open_index(tmp_path)
    slots = [store(one, number) for number in range(3)]
    other.sync()
    other.evict(slots[0])  # type: ignore[arg-type]  # it has one
    one.sync()
    assert (key_of(0) in one, len(one)) == (False, 2)
    one.clear()
    other.sync()
    assert (len(other), other.num_blank) == (0, 8)


def test_others_keep_their_pages_when_one_engine_detaches(tmp_path: Path) -> None:
    one, other = open_index(tmp_path), open_index(tmp_path)
    store(one, 1)
    one.detach()
    one.sync()
    other.sync()
    assert (len(one), one.allocate(1), one.num_free, len(other)) == (0, [], 0, 1)


def test_page_is_refused_once_when_its_salt_is_too_long(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    record = record_of(1)
    record.blocks[0].salt = "x" * 5000
    (slot,) = index.allocate(1)
    index.add_all([(slot, record)])
    index.release_all([slot])
    assert record.key in index  # it is not copied again
    assert index.page(record.key) is None
    assert index.num_blank == 8


def test_only_own_pages_are_written_to_the_disk(tmp_path: Path) -> None:
    one, other = open_index(tmp_path), open_index(tmp_path)
    slots = [store(one, 1), store(other, 2)]
    one.sync()
    pages = one.begin_eviction(8, lambda page: True)
    assert pages == slots[:1]
    one.end_eviction(pages)
    assert other.begin_eviction(8, lambda page: False) == []


def test_slots_of_an_engine_are_free_again_when_it_has_ended(tmp_path: Path) -> None:
    one, other = open_index(tmp_path, 4), open_index(tmp_path, 4)
    store(one, 1)
    other.sync()
    other.acquire([key_of(1)])
    assert len(other.allocate(2)) == 2
    other._file.close()  # as the end of its process does
    assert len(one.allocate(4)) == 1  # before it was noticed
    one.sync()
    assert len(one.allocate(4)) == 3
    assert not (one._file.users[:, other._file.row]).any()


def child_that_stores_without_end(folder: Path, seed: int) -> None:
    """What a killed engine did: stores, hits and evictions, as fast as it can."""
    draw, index = random.Random(seed), open_index(folder, 12)
    while True:
        index.sync()
        held = index.acquire([key_of(draw.randrange(40)) for _ in range(3)])
        store(index, draw.randrange(40))
        index.release_all([slot for slot in held if slot is not None])


def test_pages_are_whole_and_slots_return_when_processes_are_killed_at_any_moment(tmp_path: Path) -> None:
    survivor, draw, num_pages = open_index(tmp_path, 12), random.Random(1), 0
    for number in range(12):
        children = []
        for process in range(2):
            child = os.fork()
            if not child:
                try:
                    child_that_stores_without_end(tmp_path, 2 * number + process)
                finally:
                    os._exit(1)
            children.append(child)
        end_s = time.monotonic() + 60
        while len(survivor) < 8:  # on a busy machine they have no turn at once
            survivor.sync()
            assert time.monotonic() < end_s
            time.sleep(0.001)
        time.sleep(0.03 + draw.random() / 50)
        for child in children:
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
        survivor._reap_at_s = 0.0
        survivor.sync()
        states = survivor._file.states & np.uint64(3)
        assert not (states == FILLING).any()
        assert not survivor._file.users.any()
        num_pages += len(survivor)
        for record in survivor.records:
            (slot,) = survivor.acquire([record.key])
            assert slot is not None
            assert int(page_of(survivor, slot).astype(np.uint64).sum()) == record.digest
            survivor.release_all([slot])
    assert num_pages > 60
    restarted = SharedHostIndex(survivor._file, record_events=False)
    assert {record.key for record in restarted.records} == {record.key for record in survivor.records}


def test_calls_return_when_another_process_has_stopped_within_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_infer_engine.kv_host.pool_file._GUARD_WAIT_S", 0.001)
    one, other = open_index(tmp_path), open_index(tmp_path)
    store(one, 1)
    other.sync()
    slots = other.allocate(1)
    with one._file.guarded() as is_guarded:
        assert is_guarded
        assert other.acquire([key_of(1)]) == [None]
        assert other.allocate(1) == []
        other.add_all([(slots[0], record_of(2))])
        other.release_all(slots)
    assert other.num_blank == 6
    assert len(other.allocate(8)) == 8


@pytest.mark.parametrize("seed", range(20))
def test_calls_return_and_pages_come_again_when_bits_of_states_users_and_owners_have_flipped(
    tmp_path: Path, seed: int
) -> None:
    draw, index = random.Random(seed), open_index(tmp_path, 12)
    memory = np.frombuffer(index._file.memory, np.uint8)
    for start in range(4):
        for number in range(100):
            if draw.random() < 0.3:
                memory[draw.randrange(1024, index._file.layout.pages_at)] ^= 1 << draw.randrange(8)
            if draw.random() < 0.1:
                memory[4096 : 4096 + 1200] = np.frombuffer(draw.randbytes(1200), np.uint8)
            index._reap_at_s = 0.0
            index.sync()
            held = index.acquire([key_of(draw.randrange(20)) for _ in range(3)])
            store(index, draw.randrange(20))
            index.end_eviction(index.begin_eviction(4, lambda page: True))
            index.release_all([slot for slot in held if slot is not None])
            if not number % 10:
                index.release_all(index.allocate(2))
        if start % 2:
            index.clear()
        index._file.close()  # as the end of its process does
        index = open_index(tmp_path, 12)
        memory = np.frombuffer(index._file.memory, np.uint8)
    for number in range(100, 104):
        store(index, number)
    assert sum(key_of(number) in index for number in range(100, 104)) == 4
