"""Segments of the log: where pages are written, and what is dropped for them."""

import pytest

from mini_infer_engine.kv_disk.segments import MOST_SEGMENT_BYTES, LogLayout, SegmentLog


@pytest.mark.parametrize(
    ("page_bytes", "capacity_bytes", "slots", "segments"),
    [
        (4096, 80_000, 2, 4),  # slots of 8 KB
        (4096, 1 << 30, MOST_SEGMENT_BYTES // 8192, 4),
        (4097, 12_288 * 4, 1, 4),
        (1 << 30, (1 << 30) * 5, 1, 4),
    ],
)
def test_capacity_is_divided_into_segments(page_bytes: int, capacity_bytes: int, slots: int, segments: int) -> None:
    layout = LogLayout.of(page_bytes, 2000, capacity_bytes)
    assert (layout.slots_per_segment, layout.num_segments) == (slots, segments)
    assert layout.num_segments * layout.slots_per_segment * layout.slot_bytes <= capacity_bytes


def test_capacity_is_refused_when_it_has_no_room_for_a_few_pages() -> None:
    with pytest.raises(ValueError, match="--kv-disk-size"):
        LogLayout.of(1 << 20, 100, 3 << 20)


def test_oldest_segment_is_dropped_when_the_log_is_full() -> None:
    layout = LogLayout(4096, 4096, slots_per_segment=2, num_segments=3)
    log = SegmentLog(layout, {})
    appended = [log.append() for _ in range(8)]
    assert [location for location, _ in appended] == list(range(8))
    assert [dropped for _, dropped in appended] == [[]] * 6 + [[0], []]
    assert log.segments == [1, 2, 3]
    assert log.used_bytes == 6 * layout.slot_bytes
    assert list(log.locations(0)) == [0, 1]
    assert layout.place(5) == (2, layout.slot_bytes)


def test_new_segment_is_begun_when_a_former_process_has_left_some() -> None:
    layout = LogLayout(4096, 4096, slots_per_segment=2, num_segments=3)
    whole = 2 * layout.slot_bytes
    log = SegmentLog(layout, {4: whole, 3: whole})
    assert log.append() == (10, [])
    assert log.segments == [3, 4, 5]
    assert log.used_bytes == 5 * layout.slot_bytes
    assert log.clear() == [3, 4, 5]
    assert log.append() == (12, [])


def test_short_segments_take_the_room_of_their_pages_when_processes_ended_early() -> None:
    layout = LogLayout(4096, 4096, slots_per_segment=4, num_segments=4)
    sizes = {0: 4 * layout.slot_bytes}
    for start in range(1, 13):
        log = SegmentLog(layout, sizes)
        log.append()
        sizes = {**sizes, start: layout.slot_bytes - 1}  # it was killed before the slot was whole
        assert log.segments == list(range(start + 1)), "one page a start drops none of the others"
    assert SegmentLog(layout, sizes).append() == (13 * 4, [0])


def test_larger_segments_are_dropped_when_the_log_has_become_smaller() -> None:
    small = LogLayout(4096, 4096, slots_per_segment=1, num_segments=4)
    log = SegmentLog(small, {0: 3 * small.slot_bytes, 1: 3 * small.slot_bytes})
    assert log.trim() == [0]
    assert log.used_bytes == 3 * small.slot_bytes
    assert SegmentLog(small, {7: 5 * small.slot_bytes}).trim() == [7]
