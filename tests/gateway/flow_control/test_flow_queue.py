"""The queue as decisions: two endpoints whose room the test says, a router that prefers what the test says."""

from dataclasses import dataclass, field

import pytest

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.fleet.fair_shares import NO_KEY, Flow
from mini_infer_gateway.fleet.load import Load
from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.flow_control.flow_queue import IMMEDIATE, FlowQueue, QueuedRequest, QueueFullError
from mini_infer_gateway.routing.base import Candidate, Decision, RoutingRequest, Standing

FULL = 1 << 40


@dataclass
class World:
    """An outlet that does as it is told."""

    max_queue: int = 10
    prefers: dict[int, str | None] = field(default_factory=dict)
    """Number of a request -> where it is routed; "a" unless told."""
    queued: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 0})
    sent: list[tuple[int, str]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    capacity: int = 1
    """Requests that fill an endpoint."""

    def __post_init__(self) -> None:
        self.backlog = Backlog()
        self.queue = FlowQueue(self, self.backlog, PrefillRates(), self.max_queue)

    def route(self, entry: QueuedRequest, now_s: float) -> Decision | None:
        name = self.prefers.get(entry.order[2], "a")
        return None if name is None else Decision(Endpoint(name=name, url="", model="m"), 0, "test", "exact")

    def send(self, entry: QueuedRequest, decision: Decision, now_s: float) -> None:
        self.sent.append((entry.order[2], decision.decode.name))
        self.queued[decision.decode.name] += FULL // self.capacity

    def refuse(self, entry: QueuedRequest, retry_after_s: int) -> None:
        self.refused.append(entry.order[2])

    def abandon(self, entry: QueuedRequest) -> None:
        self.abandoned.append(entry.order[2])

    def load(self, endpoint: str) -> Load:
        return Load(0, 0, self.queued[endpoint], 0.5)

    def offer(
        self, number: int, priority: int = 0, attempted: frozenset[str] = frozenset(), flow: Flow = NO_KEY
    ) -> QueuedRequest:
        order = (priority, 0.0, number)
        request = RoutingRequest("m", 1000, attempted=attempted, order=order, flow=flow)
        entry = QueuedRequest(order, "m", request=request, flow=flow)
        self.found = self.queue.offer(entry, 0.0)
        return entry

    def done(self, endpoint: str) -> None:
        """What it had is computed."""
        self.queued[endpoint] = 0
        self.queue.report(endpoint, 0, 1.0)


def test_requests_beyond_capacity_are_sent_in_order_when_earlier_ones_end() -> None:
    world = World()
    for number in range(4):
        world.offer(number)
    assert world.sent == [(0, "a")]
    assert world.queue.depth("m") == 3
    for _ in range(4):
        world.done("a")
    assert world.sent == [(0, "a"), (1, "a"), (2, "a"), (3, "a")]
    assert world.queue.depth("m") == 0


def test_queue_orders_by_priority_then_deadline_then_arrival() -> None:
    world = World()
    for number, priority in enumerate([0, 5, 0, -3]):
        world.offer(number, priority)
    for _ in range(3):
        world.done("a")
    assert [number for number, _ in world.sent] == [0, 3, 2, 1]


def test_a_waiting_request_is_rerouted_when_another_endpoint_has_become_better() -> None:
    world = World()
    world.offer(0)
    world.offer(1)
    world.prefers[1] = "b"  # its prefix is there now, say
    world.done("a")
    assert world.sent == [(0, "a"), (1, "b")]


def test_a_rerouted_request_keeps_its_queue_position_when_the_new_endpoint_is_full() -> None:
    world = World(prefers={1: "b", 3: "b"})
    world.offer(0)
    world.offer(1)
    world.offer(2)
    world.offer(3)
    world.prefers[2] = "b"
    world.done("a")
    assert [entry.order[2] for entry in world.backlog.waiting("b")] == [2, 3]


def test_an_idle_endpoint_takes_waiting_requests_when_it_is_better_for_them() -> None:
    world = World()
    for number in range(4):
        world.offer(number)
    world.prefers[3] = "b"
    world.queue.pump("b", 1.0)
    assert world.sent == [(0, "a"), (3, "b")]
    world.queue.pump("b", 1.0)
    assert len(world.sent) == 2


def predicted_wait_s(world: World, number: int) -> float:
    """The prediction for a new request, which does not stay in the queue."""
    entry = world.offer(number)
    world.queue.drop(entry)
    return entry.predicted_wait_s


def test_wait_predictions_are_forgotten_when_an_endpoint_is_removed() -> None:
    world = World()
    for number in range(3):
        world.offer(number)
    at_first_s = predicted_wait_s(world, 9)
    world.queue.keep(["a", "b"])
    for _ in range(3):
        world.done("a")
    world.queued["a"] = FULL
    learned_s = predicted_wait_s(world, 10)
    world.queue.keep(["a", "b"])
    assert predicted_wait_s(world, 11) == learned_s != at_first_s
    world.queue.keep(["a"])
    assert predicted_wait_s(world, 12) > learned_s + 1.0


def test_requests_get_a_retry_after_when_the_queue_is_full() -> None:
    world = World(max_queue=2)
    for number in range(3):
        world.offer(number)
    with pytest.raises(QueueFullError) as caught:
        world.offer(3)
    assert caught.value.depth == 2
    assert caught.value.retry_after_s >= 1
    assert world.queue.depth("m") == 2


def test_the_last_request_is_refused_when_the_queue_is_full_and_a_higher_priority_arrives() -> None:
    world = World(max_queue=2)
    for number in range(3):
        world.offer(number)
    world.offer(3, priority=-1)
    assert world.refused == [2]
    world.done("a")
    assert world.sent[-1] == (3, "a")


def test_a_retry_is_queued_when_the_queue_is_full() -> None:
    world = World(max_queue=1)
    world.offer(0)
    world.offer(1)
    world.offer(2, attempted=frozenset({"b"}))
    assert world.queue.depth("m") == 2


def test_a_request_leaves_the_queue_at_once_when_it_is_dropped() -> None:
    world = World()
    world.offer(0)
    second, third = world.offer(1), world.offer(2)
    world.queue.drop(second)
    world.queue.drop(second)
    world.done("a")
    assert [number for number, _ in world.sent] == [0, 2]
    world.queue.drop(third)
    assert world.queue.depth("m") == 0


def test_waiting_requests_are_rerouted_or_abandoned_when_their_endpoint_is_removed() -> None:
    world = World()
    for number in range(3):
        world.offer(number)
    world.prefers |= {1: "b", 2: None}
    world.queue.place_anew("a", 1.0)
    assert world.sent == [(0, "a"), (1, "b")]
    assert world.abandoned == [2]


def test_rerouting_is_done_in_slices_when_many_wait_for_a_removed_endpoint() -> None:
    world = World(max_queue=1000)
    world.queued["a"] = world.queued["b"] = FULL
    for number in range(100):
        world.offer(number)
    world.prefers |= dict.fromkeys(range(100), "b")
    world.queue.place_anew("a", 1.0)
    moved = len(world.backlog.waiting("b"))
    assert 0 < moved < 100
    for _ in range(10):
        world.queue.place_anew("a", 1.0)
    assert [entry.order[2] for entry in world.backlog.waiting("b")] == list(range(100))


def test_nothing_is_queued_when_there_is_no_endpoint() -> None:
    world = World(prefers={0: None})
    world.offer(0)
    assert not world.found
    assert world.queue.depth("m") == 0


@pytest.mark.parametrize(("max_queue", "priority"), [(0, 0), (10, IMMEDIATE)])
def test_requests_are_sent_at_once_when_the_queue_is_off_or_their_priority_is_immediate(
    max_queue: int, priority: int
) -> None:
    world = World(max_queue=max_queue)
    for number in range(5):
        world.offer(number, priority)
    assert len(world.sent) == 5


def test_one_pump_places_a_bounded_number_of_requests() -> None:
    world = World(max_queue=1000, capacity=FULL // 4)
    world.queued["a"] = FULL
    for number in range(100):
        world.offer(number)
    world.done("a")
    assert 0 < len(world.sent) < 100
    for _ in range(10):
        world.queue.pump("a", 1.0)
    assert [number for number, _ in world.sent] == list(range(100))


MANY, FEW = Flow("many"), Flow("few")


def sent_numbers(world: World, rounds: int) -> list[int]:
    """The requests that go in so many turns of the endpoint."""
    before = len(world.sent)
    for _ in range(rounds):
        world.done("a")
        world.queue.pump("a", 0.0)
    return [number for number, _ in world.sent[before:]]


def test_a_key_with_few_requests_goes_next_when_another_has_sixty_waiting() -> None:
    world = World(max_queue=100)
    for number in range(60):
        world.offer(number, flow=MANY)
    sent_numbers(world, 20)
    world.offer(100, flow=FEW)
    world.offer(101, flow=FEW)
    assert {100, 101} <= set(sent_numbers(world, 5))


def test_a_worse_priority_of_a_key_changes_nothing_when_another_key_waits() -> None:
    world = World(max_queue=100)
    for number in range(20):
        world.offer(number, priority=-5, flow=MANY)
    world.offer(100, priority=5, flow=FEW)
    assert 100 in sent_numbers(world, 3)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_keys_share_by_their_weights_when_both_always_wait(weight: float) -> None:
    world, heavy = World(max_queue=1000), Flow("heavy", weight)
    for number in range(400):
        world.offer(number, flow=MANY)
        world.offer(1000 + number, flow=heavy)
    served = sent_numbers(world, 200)
    of_heavy = sum(number >= 1000 for number in served)
    assert of_heavy / len(served) == pytest.approx(weight / (1 + weight), abs=0.03)


def test_idle_time_is_not_saved_when_a_key_comes_back() -> None:
    world = World(max_queue=1000)
    for number in range(300):
        world.offer(number, flow=MANY)
    sent_numbers(world, 200)
    for number in range(100):
        world.offer(1000 + number, flow=FEW)
    served = sent_numbers(world, 40)
    assert sum(number >= 1000 for number in served) == pytest.approx(20, abs=2)


def test_a_key_with_few_requests_gets_a_place_when_another_has_filled_the_queue() -> None:
    world = World(max_queue=10)
    for number in range(11):
        world.offer(number, flow=MANY)
    with pytest.raises(QueueFullError):
        world.offer(50, flow=MANY)
    world.offer(100, flow=FEW)
    assert world.refused == [10]
    assert world.backlog.depth_of("m", FEW) == 1


def test_within_a_key_priority_decides_when_several_keys_wait() -> None:
    world = World(max_queue=100)
    for number in range(10):
        world.offer(number, flow=MANY)
    world.offer(100, flow=FEW)
    world.offer(101, priority=-1, flow=FEW)
    served = sent_numbers(world, 6)
    assert served.index(101) < served.index(100)


class Scored(World):
    """An outlet whose router scores two endpoints: "a" holds the prompts and is full, what "b" costs the test says."""

    def __init__(self, extra_s: float) -> None:
        """`extra_s`: seconds by which "b" costs more than "a", queues aside."""
        super().__init__()
        self.extra_s, self.routes = extra_s, 0
        self.queued = {"a": 20_000, "b": 20_000}
        for number in range(3):
            self.offer(number)
        self.routes = 0

    def route(self, entry: QueuedRequest, now_s: float) -> Decision | None:
        self.routes += 1
        both = [Candidate(Endpoint(name=name, url="", model="m")) for name in "ab"]
        waits = [self.queued[name] / 20_000 for name in "ab"]
        costs = [waits[0], waits[1] + self.extra_s]
        features = {"queued_tokens": [self.queued[name] for name in "ab"], "prefill_rate": [20_000.0] * 2}
        standing = Standing(both, costs, {**features, "page_wait": [0.0, 0.0]})
        return Decision(both[costs.index(min(costs))].endpoint, 0, "test", "exact", standing=standing)


def test_an_offer_is_not_routed_when_the_decision_holds() -> None:
    world = Scored(extra_s=5.0)
    world.queued["b"] = 0
    for _ in range(50):
        world.queue.pump("b", 0.4)
    assert world.routes == 0
    assert world.sent == []


def test_an_offer_is_routed_once_and_taken_when_queues_turn_the_decision() -> None:
    world = Scored(extra_s=0.95)
    world.queued["b"] = 7_500  # 1.33 s in all; "a" costs one, and what is kept may be wrong by 0.3
    world.queue.pump("b", 0.4)
    assert (world.routes, world.sent) == (0, [])
    world.queued["b"] = 0
    world.queue.pump("b", 0.4)
    assert (world.routes, world.sent) == (1, [(0, "b")])


def test_an_offer_is_routed_ever_more_rarely_when_queues_stay_as_they_are() -> None:
    world = Scored(extra_s=5.0)
    world.queued["b"] = 0
    for tenth in range(1, 641):
        world.queue.pump("b", tenth / 10)
    offered = 2  # the first and the last that wait for "a"
    assert world.routes == offered * 8  # after 0.5, 1, 2, 4, 8, 16, 32 and 64 s


def test_the_pause_for_pages_ends_when_the_last_waiting_request_leaves() -> None:
    world = World()
    world.offer(0)
    second = world.offer(1)
    assert world.backlog.pauses.seconds("a", 3.0) == 3.0  # it waits since 0.0
    world.queue.drop(second)
    assert world.backlog.pauses.seconds("a", 9.0) == 0.0  # nothing was placed, and nothing waits
