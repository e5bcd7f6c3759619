"""Other projects' rules as tables: what each chooses of engines whose load and cache the test says."""

from collections import OrderedDict

import pytest

from benchmarks.routing.mirror import MirroredEngine, MirroredFleet, MirroredShape
from benchmarks.routing.references.base import Policy, View
from benchmarks.routing.references.dynamo import BATCHED_TOKENS, QUEUE_THRESHOLD, Dynamo
from benchmarks.routing.references.sglang import CacheAware, LMetric
from benchmarks.routing.workload import SimulatedRequest

BLOCK = 100
SHARED = tuple(range(10))


def request(number: int, blocks: tuple[int, ...], prompt_tokens: int = 1000) -> SimulatedRequest:
    return SimulatedRequest(number, 0.0, prompt_tokens, 10, blocks)


def fleet(count: int = 3) -> View:
    shape = MirroredShape(1000, BLOCK)
    return View(MirroredFleet(shape, [MirroredEngine(shape) for _ in range(count)]), exact=True)


def warmed(policy: Policy, view: View, loads: tuple[int, ...]) -> View:
    """The first engine was sent the shared prefix; then each has as many requests in flight as `loads` says."""
    view.in_flight[1] = view.in_flight[2] = 1
    assert policy.choose(request(0, SHARED), view) == 0
    view.in_flight[:] = loads
    return view


@pytest.mark.parametrize(
    ("loads", "prompt_tokens", "chosen"),
    [
        pytest.param((9, 3, 5), 1200, 0, id="long match, alike loads"),
        pytest.param((9, 3, 5), 4000, 1, id="short match: the least loaded, not the smallest tree"),
        pytest.param((70, 3, 5), 1200, 1, id="loads apart: the least loaded"),
        pytest.param((200, 140, 150), 1200, 0, id="apart by number but not by ratio"),
    ],
)
def test_cache_aware_falls_back_to_least_load(loads: tuple[int, ...], prompt_tokens: int, chosen: int) -> None:
    policy = CacheAware()
    view = warmed(policy, fleet(), loads)
    assert policy.choose(request(1, SHARED, prompt_tokens), view) == chosen


@pytest.mark.parametrize(
    ("loads", "prompt_tokens", "chosen"),
    [
        pytest.param((3, 0, 1), 1200, 0, id="200 x 4 is less than 1200 x 1"),
        pytest.param((6, 0, 1), 1200, 1, id="200 x 7 is more"),
        pytest.param((1, 0, 0), 2000, 1, id="a tie of products goes by load"),
        pytest.param((5, 2, 2), 1000, 0, id="nothing to compute costs nothing, whatever the load"),
    ],
)
def test_lmetric_multiplies_new_work_by_load(loads: tuple[int, ...], prompt_tokens: int, chosen: int) -> None:
    policy = LMetric()
    view = warmed(policy, fleet(), loads)
    assert policy.choose(request(1, SHARED, prompt_tokens), view) == chosen


def test_lmetric_forgets_what_it_sent_when_an_engine_dies() -> None:
    policy, view = LMetric(), fleet()
    warmed(policy, view, (0, 3, 3))
    view.serving = [False, True, True]
    assert policy.choose(request(1, SHARED, 1200), view) == 1
    view.serving, view.in_flight[1] = [True, True, True], 0
    assert policy.choose(request(2, SHARED, 1200), view) == 1  # it has the prefix now, the first one has not any more


def test_dynamo_counts_blocks_of_active_requests_once() -> None:
    view = fleet(2)
    for number in range(3):
        view.note(request(number, SHARED), 0)
    view.note(request(3, tuple(range(50, 60))), 1)
    # With the same prefix the first has 10 blocks and 4 partial ones after it, the second 20 and 2.
    assert Dynamo().choose(request(4, SHARED), view) == 0
    assert Dynamo().choose(request(5, tuple(range(90, 100))), view) == 1  # 20 and 4 against 20 and 2


@pytest.mark.parametrize(
    ("tokens", "admits"), [(BATCHED_TOKENS, True), (int(QUEUE_THRESHOLD * BATCHED_TOKENS) + 1, False)]
)
def test_dynamo_queues_when_every_worker_has_too_much_to_compute(tokens: int, admits: bool) -> None:
    view = fleet(2)
    for engine in view.engines:
        assert isinstance(engine, MirroredEngine)
        engine._cached = OrderedDict()
        engine.sent(request(0, (), tokens))
    assert Dynamo().admits(view) is admits
