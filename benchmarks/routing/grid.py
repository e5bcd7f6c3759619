"""Which runs belong to a campaign, and what must hold in each: the list of loads and the bars."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from benchmarks.routing.engine_model import EngineShape
from benchmarks.routing.figures import Figures, capacity_s, figures
from benchmarks.routing.host_tier import HostShape
from benchmarks.routing.our_gateway import Keys, OurGateway
from benchmarks.routing.rates import QWEN_7B_H200
from benchmarks.routing.references.base import Policy, ReferenceGateway
from benchmarks.routing.references.dynamo import Dynamo
from benchmarks.routing.references.hashing import ConsistentHashing
from benchmarks.routing.references.llm_d import LlmD
from benchmarks.routing.references.sglang import CacheAware, LMetric
from benchmarks.routing.references.simple import LeastLoaded, RoundRobin
from benchmarks.routing.workload import Workload, attainable_hits
from benchmarks.routing.world import SimulatedGateway, World

OURS = "mini-infer"
REFERENCES: Mapping[str, Callable[[], Policy]] = {
    "llm-d": LlmD,
    "sglang": CacheAware,
    "lmetric": LMetric,
    "dynamo": Dynamo,
    "consistent-hashing": ConsistentHashing,
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
LOADS = (0.5, 0.9, 1.3, 2.0)
ENGINES = (4, 8, 16, 32)
CACHE_TOKENS = (250_000, 500_000, 1_000_000)
"""Of one engine: 14, 28 and 57 GB of a 7B model's KV cache."""
AGENTS_CACHE_TOKENS = 300_000
RECORDED_CACHE_TOKENS = 48_000
"""Of one of four engines; the sessions that are alive at a load of 0.7 have twice as many (`recorded agents`)."""

RECORDED = "recorded agents"

Fleet = Literal["equal", "two speeds", "one joins", "one dies", "two speeds, one joins, one dies"]
FLEETS: tuple[Fleet, ...] = get_args(Fleet)
SLOW = 0.5
"""Speed of every second engine of a fleet of two speeds."""
JOINS_AT, DIES_AT = 0.3, 0.6
"""Shares of the time in which requests arrive; the last engine joins, the first dies."""

TTFT_MARGIN, OUTPUT_MARGIN = 1.03, 0.97
REUSE_BAR, REUSE_LOAD = 0.95, 0.9
FALL_MARGIN = 0.99
"""Output at a load, over the most at any lower load: what counts as falling."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One situation."""

    workload: str
    engines: int
    cache_tokens: int
    load: float
    index: Literal["exact", "approximate"] = "exact"
    gateways: int = 1
    fleet: Fleet = "equal"
    host_times: float = 0.0
    """Blocks of each engine's main memory, over those of its device."""

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of each engine."""
        return tuple(SLOW if "two speeds" in self.fleet and number % 2 else 1.0 for number in range(self.engines))

    @property
    def label(self) -> str:
        """For people."""
        extra = "" if self.index == "exact" else ", approximate index"
        extra += "" if self.gateways == 1 else f", {self.gateways} gateways"
        extra += "" if self.fleet == "equal" else f", {self.fleet}"
        extra += f", {self.host_times:g} times as much main memory" if self.host_times else ""
        return f"{self.workload}, {self.engines} engines of {self.cache_tokens // 1000}k, load {self.load:g}{extra}"


@dataclass(frozen=True, slots=True)
class Result:
    """One policy in one situation."""

    cell: Cell
    policy: str
    figures: Figures

    def as_json(self) -> dict[str, Any]:
        """Flat, figures to four digits."""
        figures = {name: float(f"{value:.4g}") for name, value in asdict(self.figures).items()}
        return {**asdict(self.cell), "policy": self.policy, **figures}


def run_cell(cell: Cell, workload: Workload, policies: Sequence[str], keys: Keys) -> Iterator[Result]:
    """All these policies in one situation; `workload` at any speed, it is brought to the cell's load."""
    kv_blocks = cell.cache_tokens // workload.block_tokens
    host = HostShape(int(cell.host_times * kv_blocks))
    shape = EngineShape(kv_blocks, workload.block_tokens, QWEN_7B_H200, host=host)
    attainable = sum(attainable_hits(workload, shape.kv_blocks * cell.engines))
    whole_s = capacity_s(workload, shape.rates, sum(cell.speeds), shape.kv_blocks, shape.max_num_seqs)
    arriving = workload.at(whole_s / cell.load)
    exact = cell.index == "exact"
    for policy in policies:
        world = World(
            shape,
            cell.engines,
            _gateways(policy, keys, exact),
            cell.gateways,
            publishes=policy == OURS,
            speeds=cell.speeds,
            joins={cell.engines - 1: JOINS_AT * arriving.duration_s} if "joins" in cell.fleet else {},
            deaths={0: DIES_AT * arriving.duration_s} if "dies" in cell.fleet else {},
        )
        answers = world.run(arriving)
        host_tokens = sum(engine.host_tokens for engine in world.engines)
        yield Result(cell, policy, figures(answers, attainable, cell.engines, host_tokens))


def _gateways(policy: str, keys: Keys, exact: bool) -> Callable[[World], SimulatedGateway]:
    if policy == OURS:
        return lambda world: OurGateway(world, keys, "prefix", exact)
    return lambda world: ReferenceGateway(world, REFERENCES[policy](), exact)


def missed_bars(
    results: Sequence[Result],
    ttft_margin: float = TTFT_MARGIN,
    output_margin: float = OUTPUT_MARGIN,
    fall_margin: float = FALL_MARGIN,
    reuse_bar: float = REUSE_BAR,
) -> list[str]:
    """What does not hold, one sentence each; empty: every bar is kept. Needs our results and references' for each."""
    by_cell: dict[Cell, dict[str, Figures]] = {}
    for result in results:
        by_cell.setdefault(result.cell, {})[result.policy] = result.figures
    missed = []
    best_before: dict[Cell, float] = {}
    for cell in sorted(by_cell, key=lambda cell: cell.load):
        found = dict(by_cell[cell])
        ours = found.pop(OURS)
        name, ttft = min(((name, other.ttft_p90_s) for name, other in found.items()), key=lambda pair: pair[1])
        if ours.ttft_p90_s > ttft_margin * ttft:
            missed.append(f"{cell.label}: TTFT p90 {ours.ttft_p90_s:.3f} s, {name} {ttft:.3f}")
        name, output = max(((name, other.output_tokens_s) for name, other in found.items()), key=lambda pair: pair[1])
        if ours.output_tokens_s < output_margin * output:
            missed.append(f"{cell.label}: output {ours.output_tokens_s:.0f} tokens/s, {name} {output:.0f}")
        if cell.load <= REUSE_LOAD and ours.reuse < reuse_bar:
            missed.append(f"{cell.label}: reuse {ours.reuse:.3f} of what is attainable")
        series = replace(cell, load=0.0)
        before = best_before.get(series, 0.0)
        if ours.output_tokens_s < fall_margin * before:
            missed.append(f"{cell.label}: output falls from {before:.0f} to {ours.output_tokens_s:.0f} tokens/s")
        best_before[series] = max(before, ours.output_tokens_s)
    return missed


def full_grid(workloads: Sequence[str]) -> list[Cell]:
    """Both traces at all sizes and loads; then no reuse, an approximate index and two gateways at eight engines.

    Small fleets first: a run that is stopped has whole series.
    """
    cells = [
        Cell(name, engines, cache, load)
        for name in workloads
        if name not in ("zero reuse", "agents", RECORDED)
        for engines in ENGINES
        for cache in CACHE_TOKENS
        for load in LOADS
    ]
    cells += [Cell("zero reuse", 8, CACHE_TOKENS[1], load) for load in LOADS if "zero reuse" in workloads]
    for name in workloads:
        if name not in ("zero reuse", "agents", RECORDED):
            cells += [Cell(name, 8, CACHE_TOKENS[1], load, "approximate") for load in LOADS]
            cells += [Cell(name, 8, CACHE_TOKENS[1], load, gateways=2) for load in LOADS]
    cells += _agents_grid(FLEETS, (0.7, 1.0, 1.3)) if "agents" in workloads else []
    cells += _recorded_grid() if RECORDED in workloads else []
    return sorted(cells, key=lambda cell: cell.engines)


def reduced_grid(workloads: Sequence[str]) -> list[Cell]:
    """A few loads at four engines: what every change of the gateway is held to."""
    cells = [
        Cell(name, 4, CACHE_TOKENS[1], load)
        for name in workloads
        if name not in ("agents", RECORDED)
        for load in (0.7, 0.9, 1.3, 2.0)
    ]
    cells += _recorded_grid() if RECORDED in workloads else []
    return cells + (_agents_grid(("equal", "two speeds"), (0.7, 1.0)) if "agents" in workloads else [])


def _recorded_grid() -> list[Cell]:
    """Half of what live sessions have fits on the devices: without main memory, and with; then all of it."""
    small, large = RECORDED_CACHE_TOKENS, 20 * RECORDED_CACHE_TOKENS
    sizes = ((small, 0.0), (small, 4.0), (large, 0.0))
    return [Cell(RECORDED, 4, cache_tokens, 0.7, host_times=times) for cache_tokens, times in sizes]


def _agents_grid(fleets: Sequence[Fleet], loads: Sequence[float]) -> list[Cell]:
    return [Cell("agents", 4, AGENTS_CACHE_TOKENS, load, fleet=fleet) for fleet in fleets for load in loads]
