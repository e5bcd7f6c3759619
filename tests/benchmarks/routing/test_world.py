"""Fleets that change and clients that wait for answers, in the simulation: nothing is lost, and times are kept."""

from collections.abc import Callable

import pytest

from benchmarks.routing import grid
from benchmarks.routing.agents import ROOTS, agents
from benchmarks.routing.engine_model import EngineShape
from benchmarks.routing.our_gateway import Keys, OurGateway
from benchmarks.routing.rates import QWEN_7B_H200
from benchmarks.routing.references.base import ReferenceGateway
from benchmarks.routing.workload import Workload, sessions
from benchmarks.routing.world import SimulatedGateway, World

GATEWAYS: dict[str, Callable[[World], SimulatedGateway]] = {
    grid.OURS: lambda world: OurGateway(world, Keys(), "prefix"),
    **{name: lambda world, make=make: ReferenceGateway(world, make()) for name, make in grid.REFERENCES.items()},  # type: ignore[misc]  # a lambda with a default
}


def shape_of(workload: Workload, cache_tokens: int = 200_000) -> EngineShape:
    return EngineShape(cache_tokens // workload.block_tokens, workload.block_tokens, QWEN_7B_H200)


@pytest.mark.parametrize("gateway_name", GATEWAYS)
def test_every_request_is_answered_when_an_engine_joins_and_another_dies(gateway_name: str) -> None:
    workload_given = sessions(500).at(25.0)
    world = World(
        shape_of(workload_given),
        3,
        GATEWAYS[gateway_name],
        publishes=gateway_name == grid.OURS,
        joins={2: 5.0},
        deaths={0: 12.0},
    )
    answers = world.run(workload_given)
    assert all(answer.end_s >= answer.first_token_s > answer.request.arrival_s for answer in answers)
    assert all(answer.engine != 2 or answer.sent_s >= 5.0 for answer in answers)
    assert all(answer.engine != 0 or answer.end_s <= 12.0 for answer in answers)
    assert {answer.engine for answer in answers} == {0, 1, 2}
    for engine in world.engines:
        assert engine.free_pages == engine.shape.kv_blocks
        assert not engine.running
        assert not engine.waiting


def test_an_engine_of_half_the_speed_takes_twice_as_long() -> None:
    workload_given = sessions(60).first(1)
    times = []
    for speed in (1.0, 0.5):
        (answer,) = World(shape_of(workload_given), 1, GATEWAYS["least-loaded"], publishes=False, speeds=[speed]).run(
            workload_given
        )
        times.append(answer.end_s - answer.request.arrival_s)
    assert times[1] == pytest.approx(2 * times[0])


def test_requests_of_a_closed_loop_arrive_when_those_before_them_have_ended() -> None:
    workload_given = agents(400)
    answers = World(shape_of(workload_given), 2, GATEWAYS[grid.OURS]).run(workload_given.at(60.0))
    assert len(answers) == len(workload_given.requests) >= 400
    ends = {answer.request.number: answer.end_s for answer in answers}
    followed = 0
    for answer in answers:
        if follow := workload_given.follows.get(answer.request.number):
            last_s = max(ends[number] for number in follow.numbers)
            assert answer.request.arrival_s == pytest.approx(last_s + follow.pause_s)
            followed += 1
    assert followed > 250


def test_agents_share_roots_grow_and_fan_out() -> None:
    workload_given = agents(2000)
    assert workload_given == agents(2000)
    by_number = {request.number: request for request in workload_given.requests}
    joined = 0
    for number, follow in workload_given.follows.items():
        own, before = by_number[number], [by_number[one] for one in follow.numbers]
        assert all(one.session == own.session for one in before)
        joined += len(before) > 1
        if len(before) == 1:  # it sees the answer before it, or, of several at once, what that one saw
            common = sum(one == other for one, other in zip(own.blocks, before[0].blocks, strict=False))
            assert common * workload_given.block_tokens >= 1000
    assert joined > 20
    assert len({request.blocks[0] for request in workload_given.requests}) <= ROOTS


def test_an_idle_slower_engine_works_when_the_faster_one_is_full() -> None:
    workload_given = sessions(400)
    world = World(shape_of(workload_given, 150_000), 2, GATEWAYS[grid.OURS], speeds=[1.0, 0.5])
    answers = world.run(workload_given.at(12.0))
    assert sum(answer.engine == 1 for answer in answers) > 0.2 * len(answers)
    slow = sorted(answer.sent_s - answer.request.arrival_s for answer in answers)
    assert slow[len(slow) // 2] < 10.0
