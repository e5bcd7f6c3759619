"""Slots of running sequences, which transfers pin."""

from mini_infer_engine.core.slot_allocator import SlotAllocator


def test_slot_is_reused_only_after_its_last_pin_when_its_sequence_has_ended() -> None:
    slots = SlotAllocator(2)
    first, _ = slots.allocate(), slots.allocate()
    slots.pin(first)
    slots.pin(first)
    slots.release(first)
    assert slots.num_free == 0
    slots.unpin(first)
    assert slots.num_free == 0
    assert slots.has_pins
    slots.unpin(first)
    assert slots.num_free == 1
    assert not slots.has_pins
    assert slots.allocate() == first


def test_slot_is_free_at_once_when_its_pin_has_ended_before_its_sequence() -> None:
    slots = SlotAllocator(1)
    slot = slots.allocate()
    slots.pin(slot)
    slots.unpin(slot)
    assert slots.num_free == 0
    slots.release(slot)
    assert slots.num_free == 1


def test_all_are_kept_out_when_no_sequence_has_a_slot_and_none_is_free() -> None:
    slots = SlotAllocator(2)
    for slot in (slots.allocate(), slots.allocate()):
        slots.pin(slot)
        assert not slots.are_all_kept_out
        slots.release(slot)
    assert slots.are_all_kept_out
    slots.unpin(0)
    assert not slots.are_all_kept_out
