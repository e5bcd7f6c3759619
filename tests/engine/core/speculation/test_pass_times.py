"""What passes take, as measured, as tables."""

import pytest

from mini_infer_engine.core.speculation.pass_times import (
    GuessCosts,
    PassKind,
    PassTimes,
    ReadingTimes,
    assumed_seconds,
    pass_kind,
)


def measured(*seconds: float) -> PassTimes:
    times = PassTimes()
    for now, one in enumerate(seconds):
        times.add(one, now)
    return times


def test_a_window_is_three_passes_and_counts_when_it_is_full() -> None:
    assert not measured(1.0, 2.0).windows
    assert measured(1.0, 2.0, 6.0).seconds == 3.0
    assert measured(1.0, 2.0, 6.0).measured_at == 2


def test_pass_times_are_the_mean_when_passes_alternate() -> None:
    assert measured(*(0.5, 1.5) * 6).seconds == pytest.approx(1.0, abs=0.2)


def test_pass_times_ignore_the_first_passes_and_stalls() -> None:
    assert measured(*[9.0] * 3, *[1.0] * 9).seconds == 1.0
    assert measured(*[1.0] * 7, 50.0, *[1.0] * 4).seconds == 1.0


def test_pass_times_keep_four_windows() -> None:
    assert measured(*[1.0] * 12, *[2.0] * 12).seconds == 2.0


def test_pass_times_count_a_window_when_it_is_closed_early() -> None:
    times = measured(1.0, 2.0)
    times.close(7)
    times.close(8)  # nothing came since
    assert (times.seconds, times.measured_at) == (1.5, 7)


def test_catch_up_time_is_zero_until_it_is_measured_and_then_linear() -> None:
    reading = ReadingTimes()
    assert reading.seconds(100) == 0
    reading.add(16, 2.5)
    assert reading.seconds(0) == 0
    assert reading.seconds(16) == reading.seconds(1000) == reading.mean_s == 2.5
    reading.add(1000, 3.5)
    assert reading.seconds(16) == pytest.approx(2.5)
    assert reading.seconds(1000) == pytest.approx(3.5)
    assert 3.5 < reading.seconds(2000) < 5


def test_catch_up_time_never_falls_with_tokens_when_a_measurement_was_slow() -> None:
    reading = ReadingTimes()
    reading.add(16, 9.0)
    reading.add(1000, 3.0)
    assert reading.seconds(5000) >= 3.0


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [(1, 1, True), (1, 2, False), (9, 16, True), (16, 17, False), (33, 48, True), (48, 49, False), (97, 128, True)],
)
def test_pass_kinds_are_equal_when_batch_sizes_are_similar(one: int, other: int, alike: bool) -> None:
    assert (PassKind(one, 0).size == PassKind(other, 3).size) is alike
    assert PassKind(one, 0, masked=True).size != PassKind(one, 0).size


def test_device_time_is_that_of_the_next_larger_measured_batch() -> None:
    costs = GuessCosts({(1, 3): 1.0, (8, 3): 2.0, (8, 5): 3.0})
    assert [costs.least_s(rows, 3) for rows in (1, 2, 8, 9)] == [1.0, 2.0, 2.0, 0.0]
    assert costs.least_s(1, 1) == 0.0


def test_assumed_time_is_interpolated_between_measured_draft_counts() -> None:
    assert assumed_seconds(3, {0: 1.0, 5: 6.0}) == pytest.approx(4.0)
    assert assumed_seconds(3, {0: 1.0, 1: 2.0, 5: 6.0}) == pytest.approx(4.0)
    assert 1.0 < assumed_seconds(5, {0: 1.0}) < 1.5
    assert 2.0 < assumed_seconds(5, {0: 1.0, 3: 2.0}) < 2.5


def test_pass_kinds_are_interned() -> None:
    assert pass_kind(3, 0) is pass_kind(3, 0)
    assert pass_kind(3, 0) == PassKind(3, 0)
