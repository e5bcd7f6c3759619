"""Prefill engines in the simulation: nothing is lost on the way, and the learned rule keeps more than fixed ones."""

from benchmarks.routing import apart
from benchmarks.routing.engine_model import EngineShape
from benchmarks.routing.our_gateway import Keys, OurGateway
from benchmarks.routing.rates import QWEN_7B_H200
from benchmarks.routing.workload import sessions, zero_reuse
from benchmarks.routing.world import World


def test_every_simulated_request_is_answered_once_and_pages_are_freed() -> None:
    workload = sessions(300)
    shape = EngineShape(500_000 // workload.block_tokens, workload.block_tokens, QWEN_7B_H200)
    world = World(shape, 3, lambda world: OurGateway(world, Keys(), "prefix"), prefill_count=1)
    answers = world.run(workload.at(30.0))
    assert all(answer.end_s >= answer.first_token_s > answer.request.arrival_s for answer in answers)
    assert {answer.engine for answer in answers} == {1, 2}
    assert {answer.prefill for answer in answers} == {0, None}
    assert all(engine.decode_rows == engine.kv_tokens == 0 for engine in world.engines)
    assert all(not engine.running and not engine.waiting for engine in world.engines)
    assert all(engine.free_pages == shape.kv_blocks for engine in world.engines)
    (gateway,) = world.gateways
    assert isinstance(gateway, OurGateway)
    assert all(gateway.ledger.in_flight(engine.name) == 0 for engine in world.engines)


def test_the_learned_rule_keeps_both_targets_where_numbers_of_tokens_do_not() -> None:
    """Half load without any reuse: one prefill engine of four can compute many of the prompts but not all."""
    workload, keys = zero_reuse(1000), Keys()

    def goodput(rule: str, prefill: int = 1) -> float:
        return apart.run(workload, 4, prefill, rule, 0.5, 1e6, keys).goodput

    learned = goodput("learned")
    assert learned > 0.98
    assert learned >= goodput("learned", prefill=0) - 0.005, "no worse than unified engines"
    assert learned > max(goodput(rule) for rule in ("always", "never", "512", "2048")) + 0.1


def test_nothing_is_disaggregated_when_the_link_is_known_to_be_slow() -> None:
    assert apart.run(zero_reuse(200), 4, 1, "learned", 0.5, 5e3, Keys()).apart <= 0.01
