"""Pauses between placements: learned while something waits, and no shorter than the present one."""

import pytest

from mini_infer_gateway.fleet.placement_pauses import PlacementPauses


def test_the_pause_is_the_time_between_placements_when_requests_wait() -> None:
    pauses = PlacementPauses()
    pauses.began("a", 10.0)
    pauses.began("a", 11.0)  # a second one waits: the first began the pause
    pauses.placed("a", 14.0, still_waiting=True)
    assert pauses.seconds("a", 14.0) == 4.0
    pauses.placed("a", 23.0, still_waiting=False)
    assert pauses.seconds("a", 99.0) == pytest.approx(5.0)  # a fifth of the way to 9


def test_the_present_pause_counts_when_it_is_longer_than_the_mean() -> None:
    pauses = PlacementPauses()
    pauses.began("a", 0.0)
    pauses.placed("a", 1.0, still_waiting=True)
    assert pauses.seconds("a", 1.5) == 1.0
    assert pauses.seconds("a", 8.0) == 7.0


def test_nothing_is_learned_when_nothing_waited() -> None:
    pauses = PlacementPauses()
    pauses.placed("a", 5.0, still_waiting=False)
    pauses.began("a", 6.0)
    pauses.left("a")
    pauses.placed("a", 60.0, still_waiting=False)
    assert pauses.seconds("a", 99.0) == 0.0


def test_an_endpoint_is_forgotten_when_it_is_gone() -> None:
    pauses = PlacementPauses()
    pauses.began("a", 0.0)
    pauses.began("b", 0.0)
    pauses.keep(["b"])
    assert (pauses.seconds("a", 2.0), pauses.seconds("b", 2.0)) == (0.0, 2.0)
