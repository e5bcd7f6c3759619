"""Checkpoints of recurrent state by the keys of blocks: which are found, kept and evicted."""

from mini_infer_engine.core.state_checkpoints import StateCheckpoints

KEYS = [bytes([number]) * 4 for number in range(8)]


def published(checkpoints: StateCheckpoints, *keys: bytes) -> list[int]:
    """The slots of new checkpoints."""
    slots = []
    for key in keys:
        slot = checkpoints.reserve()
        assert slot is not None
        assert checkpoints.publish(slot, key)
        slots.append(slot)
    return slots


def test_the_longest_checkpoint_is_found_when_it_ends_with_a_whole_page() -> None:
    checkpoints = StateCheckpoints(4)
    published(checkpoints, KEYS[1], KEYS[4])
    assert checkpoints.longest(KEYS, 8, 1) == 5
    assert checkpoints.longest(KEYS, 4, 1) == 2
    assert checkpoints.longest(KEYS, 8, 2) == 2, "the fifth block is in the middle of a page"
    assert checkpoints.longest(KEYS, 1, 1) == 0


def test_the_least_recently_used_checkpoint_is_evicted_when_all_slots_are_taken() -> None:
    checkpoints = StateCheckpoints(3)
    slots = published(checkpoints, *KEYS[:3])
    checkpoints.touch(KEYS[0])
    assert checkpoints.acquire(KEYS[1]) == slots[1]
    assert published(checkpoints, KEYS[3]) == [slots[2]]
    assert published(checkpoints, KEYS[4]) == [slots[0]]
    assert [key in checkpoints for key in KEYS[:5]] == [False, True, False, True, True]


def test_no_slot_is_reserved_when_all_have_users() -> None:
    checkpoints = StateCheckpoints(2)
    published(checkpoints, KEYS[0])
    slot = checkpoints.acquire(KEYS[0])
    assert checkpoints.reserve() is not None
    assert checkpoints.reserve() is None
    checkpoints.release(slot)
    assert checkpoints.reserve() == slot
    assert KEYS[0] not in checkpoints


def test_a_second_checkpoint_is_dropped_when_its_key_is_taken() -> None:
    checkpoints = StateCheckpoints(2)
    (first,) = published(checkpoints, KEYS[0])
    second = checkpoints.reserve()
    assert second is not None
    assert not checkpoints.publish(second, KEYS[0])
    assert checkpoints.acquire(KEYS[0]) == first
    assert published(checkpoints, KEYS[1]) == [second], "a blank slot is taken first"


def test_a_forgotten_checkpoint_stays_readable_when_a_sequence_has_acquired_it() -> None:
    checkpoints = StateCheckpoints(1)
    published(checkpoints, KEYS[0])
    slot = checkpoints.acquire(KEYS[0])
    checkpoints.forget(KEYS[0])
    assert KEYS[0] not in checkpoints
    assert checkpoints.reserve() is None
    checkpoints.release(slot)
    assert published(checkpoints, KEYS[1]) == [slot]
    checkpoints.clear()
    assert len(checkpoints) == checkpoints.num_in_use == 0
