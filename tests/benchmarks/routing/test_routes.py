"""The queue routes a request a few times at most, however many engines there are to offer it to."""

import pytest

from benchmarks.routing.engine_model import EngineShape
from benchmarks.routing.figures import capacity_s
from benchmarks.routing.our_gateway import Keys
from benchmarks.routing.rates import QWEN_7B_H200
from benchmarks.routing.routes import CountingGateway
from benchmarks.routing.workload import sessions
from benchmarks.routing.world import World


@pytest.mark.parametrize(("load", "most"), [(1.0, 3), (1.5, 4)])  # 3.8 and 12.5 when every offer was routed
def test_a_request_is_routed_a_few_times_when_32_engines_are_busy(load: float, most: int) -> None:
    workload_given = sessions(2000)
    shape = EngineShape(100_000 // workload_given.block_tokens, workload_given.block_tokens, QWEN_7B_H200)
    whole_s = capacity_s(workload_given, shape.rates, 32, shape.kv_blocks, shape.max_num_seqs)
    gateways: list[CountingGateway] = []

    def make(world: World) -> CountingGateway:
        gateways.append(CountingGateway(world, Keys()))
        return gateways[-1]

    World(shape, 32, make).run(workload_given.at(whole_s / load))
    (gateway,) = gateways
    assert gateway.requests == 2000
    assert gateway.routes <= most * gateway.requests
