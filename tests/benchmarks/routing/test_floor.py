"""The floor under every change of routing: no bar is missed in a small simulation, and the queue keeps its promises."""

from dataclasses import replace

import pytest

from benchmarks.routing.__main__ import main, parse
from benchmarks.routing.agents import agents
from benchmarks.routing.engine_model import EngineShape
from benchmarks.routing.figures import Figures, capacity_s, figures, quantile
from benchmarks.routing.grid import OURS, REFERENCES, Cell, Fleet, Result, missed_bars, run_cell
from benchmarks.routing.our_gateway import Keys, OurGateway
from benchmarks.routing.rates import QWEN_7B_H200
from benchmarks.routing.workload import Workload, find_mooncake, mooncake, sessions, zero_reuse
from benchmarks.routing.world import World

FLOOR = {"ttft_margin": 1.15, "output_margin": 0.95, "fall_margin": 0.95, "reuse_bar": 0.8}
"""A run of a minute of traffic says less than a campaign: two such runs differ by so much by chance."""
REFERENCES_HERE = ("llm-d", "sglang", "lmetric", "dynamo", "consistent-hashing", "least-loaded")


def workload(name: str) -> Workload:
    if name == "mooncake":
        trace = find_mooncake()
        if trace is None:
            pytest.skip("the recorded trace is not here: see python -m benchmarks.routing --help")
        return mooncake(trace, 1200)
    return zero_reuse(800) if name == "zero reuse" else sessions(1600)


@pytest.mark.parametrize("name", ["mooncake", "sessions", "zero reuse"])
def test_routing_bars_are_kept(name: str) -> None:
    keys, workload_given = Keys(), workload(name)
    results = []
    for load in (0.9, 1.4):
        results += run_cell(Cell(name, 4, 500_000, load), workload_given, (OURS, *REFERENCES_HERE), keys)
    assert missed_bars(results, **FLOOR) == []


@pytest.mark.parametrize("fleet", ["equal", "two speeds", "two speeds, one joins, one dies"])
def test_every_bar_is_kept_when_agents_wait_for_answers(fleet: Fleet) -> None:
    cell = Cell("agents", 4, 300_000, 0.7, fleet=fleet)
    assert missed_bars(list(run_cell(cell, agents(3000), (OURS, *REFERENCES_HERE), Keys())), **FLOOR) == []


@pytest.mark.parametrize(("index", "gateways"), [("approximate", 1), ("exact", 2)])
def test_routing_bars_are_kept_when_less_is_known(index: str, gateways: int) -> None:
    cell = Cell("sessions", 4, 500_000, 1.2, index, gateways)  # type: ignore[arg-type]  # a parameter is a str
    assert missed_bars(list(run_cell(cell, workload("sessions"), (OURS, *REFERENCES_HERE), Keys())), **FLOOR) == []


def test_a_bounded_queue_refuses_and_predicts() -> None:
    workload_given = sessions(1600)
    shape = EngineShape(250_000 // workload_given.block_tokens, workload_given.block_tokens, QWEN_7B_H200)
    whole_s = capacity_s(workload_given, shape.rates, 2, shape.kv_blocks, shape.max_num_seqs)
    world = World(shape, 2, lambda world: OurGateway(world, Keys(), "prefix", max_queue=40))
    answers = world.run(workload_given.at(whole_s / 2.5))
    refused = [answer for answer in answers if answer.refused]
    assert refused
    assert all(answer.predicted_wait_s is not None and answer.predicted_wait_s >= 1 for answer in refused)
    waits = [
        (answer.sent_s - answer.request.arrival_s, answer.predicted_wait_s)
        for answer in answers
        if answer.predicted_wait_s is not None and not answer.refused
    ]
    assert max(waited for waited, _ in waits) < 30.0  # a bounded queue is a bounded wait
    off = sorted(abs(waited - predicted) for waited, predicted in waits)
    mean = sum(waited for waited, _ in waits) / len(waits)
    assert quantile(off, 0.5) < 0.6 * mean


def figure(ttft_s: float, output: float, reuse: float = 1.0) -> Figures:
    return Figures(1, ttft_s, ttft_s, ttft_s, ttft_s, output, 0.5, reuse, 1, 1.0)


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (figure(1.02, 98.0), []),
        (figure(1.04, 98.0), ["TTFT p90 1.040 s, llm-d 1.000"]),
        (figure(1.0, 96.0), ["output 96 tokens/s, sglang 100"]),
        (figure(1.0, 100.0, 0.94), ["reuse 0.940 of what is attainable"]),
    ],
)
def test_missed_bars_are_found(ours: Figures, missed: list[str]) -> None:
    cell = Cell("sessions", 4, 250_000, 0.9)
    results = [
        Result(cell, OURS, ours),
        Result(cell, "llm-d", figure(1.0, 90.0)),
        Result(cell, "sglang", figure(2.0, 100.0)),
    ]
    assert [text.split(": ", 1)[1] for text in missed_bars(results)] == missed


def test_a_bar_is_missed_when_output_falls_with_load() -> None:
    cell = Cell("sessions", 4, 250_000, 1.0)
    results = []
    for load, output in ((1.0, 100.0), (1.5, 98.0)):
        at = replace(cell, load=load)
        results += [Result(at, OURS, figure(1.0, output)), Result(at, "llm-d", figure(1.0, 50.0))]
    assert missed_bars(results) == ["sessions, 4 engines of 250k, load 1.5: output falls from 100 to 98 tokens/s"]


def test_simulated_figures_equal_those_of_the_answers() -> None:
    workload_given = zero_reuse(60)
    shape = EngineShape(500, workload_given.block_tokens, QWEN_7B_H200)
    world = World(shape, 1, lambda world: OurGateway(world, Keys(), "load"))
    answers = world.run(workload_given)
    found = figures(answers, 0, 1)
    assert found.requests == 60
    assert found.hit_share == 0.0
    assert found.computed_tokens == sum(request.prompt_tokens for request in workload_given.requests)
    assert found.ttft_p50_s <= found.ttft_p90_s <= found.ttft_p99_s


def test_the_routing_command_refuses_unknown_names() -> None:
    with pytest.raises(SystemExit, match="mini-infer, llm-d"):
        main(["--policies", "magic"])
    with pytest.raises(SystemExit, match="choose of mooncake"):
        main(["--workloads", "magic"])
    with pytest.raises(SystemExit, match="there is no file"):
        main(["--trace", "/nowhere"])
    assert set(parse([]).policies.split(",")) == {OURS, *REFERENCES}
