"""Cached blocks are loaded from a lower tier or computed: the choice as tables."""

import pytest

from mini_infer_engine.core.kv_tiers.load_choice import (
    CopyCost,
    FirstPass,
    loads_with_pass,
    pages_to_load,
    pages_to_resume_after,
)

PAGE = 16
HOST, DISK = "host", "disk"


def costs(host_s: float = 1e-6, disk_s: float = 1e-5, latency_s: float = 0.001) -> dict[str, CopyCost]:
    return {HOST: CopyCost(latency_s, host_s), DISK: CopyCost(latency_s, disk_s)}


@pytest.mark.parametrize(
    ("media", "compute_tokens_per_s", "expected"),
    [
        ([HOST] * 100, 10_000, 100),  # 160 ms of computing against 2.6 ms
        ([HOST], 10_000, 1),  # 1.6 ms against 1.02 ms
        ([HOST], 100_000, 0),  # 0.16 ms against 1.02 ms: the latency alone is more
        ([HOST] * 100, 2_000_000, 0),  # a token is computed faster than it is copied
        ([HOST] * 10 + [DISK] * 10, 10_000, 20),
        ([HOST] * 10 + [DISK] * 10, 90_000, 10),  # host: 1.8 ms against 1.2 ms; disk: 1.8 ms against 2.6 ms
        ([DISK] * 10 + [HOST] * 100, 90_000, 110),  # what follows pays for the disk
        ([DISK] * 10, 90_000, 0),
        ([], 10_000, 0),
    ],
)
def test_pages_are_loaded_when_that_saves_the_most_time(
    media: list[str], compute_tokens_per_s: float, expected: int
) -> None:
    assert pages_to_load(media, PAGE, costs(), compute_tokens_per_s) == expected


@pytest.mark.parametrize(
    ("num_resumable", "num_on_device", "media", "states", "expected"),
    [
        (0, 0, [HOST] * 100, {100: [HOST] * 5}, 100),  # 160 ms of computing against 2.7 ms
        (0, 0, [HOST] * 100, {}, 0),  # pages without a state are of no use
        (0, 100, [], {100: [HOST] * 5}, 100),  # the state alone is loaded
        (0, 0, [HOST] * 100, {100: []}, 100),  # the state is on the device
        (90, 100, [], {100: [HOST] * 5000}, 90),  # 16 ms of computing against 81 ms: the state is large
        (0, 0, [HOST] * 100, {60: [HOST] * 5, 100: [HOST] * 5000}, 60),  # the shorter prefix has the smaller state
        (0, 0, [HOST] * 100, {60: [HOST] * 5, 100: [DISK] * 5}, 100),
        (0, 0, [HOST] * 60 + [DISK] * 40, {60: [HOST], 100: [DISK] * 600}, 60),
        (50, 50, [HOST] * 2, {52: [HOST] * 150}, 50),  # 3.2 ms of computing against 3.4 ms
        (50, 50, [HOST] * 3, {53: [HOST] * 150}, 53),  # 4.8 ms
    ],
)
def test_sequence_resumes_after_the_pages_and_the_state_that_save_the_most_time(
    num_resumable: int, num_on_device: int, media: list[str], states: dict[int, list[str]], expected: int
) -> None:
    found = pages_to_resume_after(num_resumable, num_on_device, media, states, PAGE, costs(), 10_000)
    assert found == expected


@pytest.mark.parametrize(
    ("load_s", "num_tokens", "num_running", "num_waiting", "expected"),
    [
        (0.001, 16, 0, 0, True),
        (10.0, 16, 0, 0, True),  # nobody else is held up
        (0.0008, 16, 0, 0, False),  # nothing is saved
        (0.001, 16, 0, 1, False),  # others may need the same blocks
        (0.001, 16, 0, 7, False),
        (0.001, 16, 1, 0, True),  # a millisecond is little
        (0.0025, 16, 1, 0, True),  # 1.6 ms of computing and one of delay
        (0.0027, 16, 1, 0, False),
        (0.2, 2048, 40, 0, True),
        (0.3, 2048, 40, 0, False),
    ],
)
def test_load_goes_with_the_pass_when_it_holds_nobody_up(
    load_s: float, num_tokens: int, num_running: int, num_waiting: int, expected: bool
) -> None:
    first_pass = FirstPass(num_tokens, num_running, num_waiting)
    assert loads_with_pass(load_s, 0.0009, first_pass, 10_000) == expected


def test_cost_is_the_first_estimate_when_nothing_was_measured() -> None:
    cost = CopyCost(0.002, 1e-5)
    assert cost.seconds(0) == pytest.approx(0.002)
    assert cost.seconds(1000) == pytest.approx(0.012)
    assert cost.tokens_per_s == 0


def test_cost_follows_the_measurements_when_they_differ_from_the_estimate() -> None:
    cost = CopyCost(0.0001, 1e-7)
    for num_tokens in (16, 512, 4096) * 20:
        cost.measured(num_tokens, 0.003 + num_tokens * 2e-5)
    assert cost.seconds(100) == pytest.approx(0.005, rel=0.05)
    assert cost.seconds(4000) == pytest.approx(0.083, rel=0.05)
    assert 40_000 < cost.tokens_per_s < 50_000


@pytest.mark.parametrize("measured", [[(16, 0.5), (4096, 0.001)], [(16, 0.0)], [(4096, 1e-9), (16, 1e-9)]])
def test_no_cost_is_negative_when_measurements_contradict_each_other(measured: list[tuple[int, float]]) -> None:
    cost = CopyCost(0.001, 1e-6)
    for num_tokens, seconds in measured * 5:
        cost.measured(num_tokens, seconds)
    assert all(cost.seconds(num_tokens) >= 0 for num_tokens in (0, 16, 100_000))


def test_loads_are_tried_again_when_a_slow_phase_is_long_ago() -> None:
    slow = costs()
    for _ in range(20):
        slow[HOST].measured(1600, 2.0)
    declined = 0
    while not pages_to_load([HOST] * 100, PAGE, slow, 10_000):
        slow[HOST].declined()
        declined += 1
        assert declined < 2_000
    assert declined > 20
