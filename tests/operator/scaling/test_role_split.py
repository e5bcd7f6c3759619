"""One number of engines split between prefill and decode, as tables and over minutes of samples."""

import itertools
from math import inf

import pytest

from mini_infer_operator.scaling.pair_planner import split_between_roles
from mini_infer_operator.scaling.plan_state import Fleet, Memory
from mini_infer_operator.scaling.planner import plan_replicas
from mini_infer_operator.scaling.policy import ScalingPolicy, Targets, Windows
from mini_infer_operator.scaling.role_split import Part, split
from mini_infer_operator.scaling.signals import EngineRates, Sample

RATES = EngineRates(prefill_tokens_per_s=10_000, pass_s=0.02, row_s=0.0005)


def part(need: float, replicas: int, ready: int | None = None, least: int = 1, most: int = 20) -> Part:
    return Part(need, replicas, replicas if ready is None else ready, least, most)


@pytest.mark.parametrize(
    ("total", "prefill", "decode", "expected"),
    [
        pytest.param(4, part(1.0, 2), part(1.0, 2), (2, 2), id="both have enough"),
        pytest.param(4, part(2.9, 2), part(0.9, 2), (3, 1), id="prefill is short, decode can spare one"),
        pytest.param(4, part(0.9, 2), part(2.9, 2), (1, 3), id="the other way"),
        pytest.param(4, part(2.1, 2), part(1.9, 2), (2, 2), id="a switch gains nothing"),
        pytest.param(8, part(8.0, 4), part(4.0, 4), (4, 4), id="both are short: decode first"),
        pytest.param(8, part(2.0, 4), part(9.0, 4), (1, 7), id="decode first, but for one"),
        pytest.param(4, part(9.0, 2), part(0.0, 2), (3, 1), id="decode keeps its least"),
        pytest.param(4, part(9.0, 2, most=2), part(0.5, 2), (2, 2), id="prefill has its most"),
        pytest.param(6, part(3.5, 2), part(2.0, 2), (4, 2), id="two more start, and none switches"),
        pytest.param(8, part(6.0, 2), part(0.5, 4), (7, 1), id="three switch at once, and two start"),
        pytest.param(3, part(1.0, 2), part(1.0, 2), (1, 2), id="one goes"),
        pytest.param(6, part(3.0, 4, ready=2), part(1.0, 2), (5, 1), id="ready ones count before those that start"),
        pytest.param(4, part(2.9, 3, ready=2), part(0.9, 1, ready=2), (3, 1), id="a switch is on its way"),
        pytest.param(2, part(1.0, 0), part(1.0, 0), (1, 1), id="from zero"),
        pytest.param(0, part(0.0, 1, least=0), part(0.0, 1, least=0), (0, 0), id="to zero"),
    ],
)
def test_split_serves_decode_first_and_gives_prompts_the_rest(
    total: int, prefill: Part, decode: Part, expected: tuple[int, int]
) -> None:
    assert split(total, prefill, decode) == expected


def test_no_engine_switches_when_it_may_not() -> None:
    assert split(4, part(2.9, 2), part(0.9, 2), may_switch=False) == (2, 2)


POLICY = ScalingPolicy(1, 6, Targets(1.0, 0.1), Windows(down_s=300.0))


def load(at_s: float, prompts: float, tokens: float) -> Sample:
    """Returns a sample whose prompts and tokens keep so many engines busy."""
    rows = tokens / RATES.row_s * 0.08
    return Sample(at_s, prompts * 10_000, tokens / RATES.row_s, 10.0, running_requests=int(rows))


def test_six_engines_switch_both_ways_when_the_load_moves_between_roles() -> None:
    numbers, memory, found = {"prefill": 2, "decode": 4}, Memory(), []
    for second in range(360):
        prompts, tokens = (0.6, 2.8) if (second // 60) % 2 == 0 else (2.4, 0.6)
        fleets = {role: Fleet(number, number) for role, number in numbers.items()}
        sample, policies = load(float(second), prompts, tokens), dict.fromkeys(numbers, POLICY)
        planned, memory = plan_replicas(policies, fleets, sample, RATES, memory, are_roles_interchangeable=True)
        numbers, memory = split_between_roles(6, planned, fleets, memory, float(second))
        found.append((numbers["prefill"], numbers["decode"]))
    changes = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(found) if a != b]
    assert any(prefill > 0 for prefill, _ in changes)
    assert any(decode > 0 for _, decode in changes)
    assert {prefill + decode for prefill, decode in changes} == {0}, "each is a switch"
    assert len(changes) <= 15


def test_engines_switch_before_others_start_when_prompts_wait() -> None:
    numbers = {"prefill": 1, "decode": 3}
    fleets = {role: Fleet(number, number) for role, number in numbers.items()}
    sample = Sample(1.0, queued_tokens=250_000, running_requests=1)
    policies = dict.fromkeys(numbers, POLICY)
    planned, _ = plan_replicas(policies, fleets, sample, RATES, Memory(), 20.0, are_roles_interchangeable=True)
    assert {role: one.replicas for role, one in planned.items()} == {"prefill": 3, "decode": 1}
    apart, _ = plan_replicas(policies, fleets, sample, RATES, Memory(), 20.0)
    assert {role: one.replicas for role, one in apart.items()} == {"prefill": 3, "decode": 3}


def test_both_roles_stop_when_there_are_no_requests() -> None:
    policy = ScalingPolicy(0, 4, Targets(1.0, inf), Windows(down_s=5.0, zero_s=10.0))
    numbers, memory = {"prefill": 1, "decode": 1}, Memory()
    for second in range(20):
        fleets = {role: Fleet(number, number) for role, number in numbers.items()}
        planned, memory = plan_replicas(
            dict.fromkeys(numbers, policy), fleets, Sample(float(second)), RATES, memory, are_roles_interchangeable=True
        )
        numbers = {role: one.replicas for role, one in planned.items()}
    assert numbers == {"prefill": 0, "decode": 0}
    waiting = Sample(21.0, queued_requests=1)
    planned, _ = plan_replicas(
        dict.fromkeys(numbers, policy),
        {role: Fleet(0, 0) for role in numbers},
        waiting,
        RATES,
        memory,
        are_roles_interchangeable=True,
    )
    assert {role: one.replicas for role, one in planned.items()} == {"prefill": 1, "decode": 1}
