"""Autoscalers beside each other on recorded loads: the share of requests that keep their targets, at equal GPU-hours.

The planner is the operator's own (mini_infer_operator.scaling); engines are the model of `python -m benchmarks.routing`
with its measured rates, at a tenth of their speed, so that an hour of one of these traces needs several engines. Each
autoscaler runs with several settings of its one knob; between two of them its share is interpolated, at the GPU-hours
of the planner's default. Needs the traces of ../shared/data; leaves out those that are absent.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.routing.rates import QWEN_7B_H200
from benchmarks.routing.workload import SimulatedRequest
from benchmarks.scaling.fleet import ScaledFleet, Scaler, Setup
from benchmarks.scaling.loads import all_loads, noise
from benchmarks.scaling.scalers import Hpa, Oracle, Planner, Saturation
from mini_infer_operator.scaling.signals import EngineRates

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TENTH = Setup(QWEN_7B_H200.at_speed(0.1))
FIFTH = Setup(QWEN_7B_H200.at_speed(0.2), ttft_s=10.0)
"""For Mooncake's prompts, of which the mean has 12,000 tokens and the longest 126,000."""
FIRST = 3
"""Engines at the start of each run."""
DEFAULT_PERCENTILE = 0.95


@dataclass(frozen=True, slots=True)
class Case:
    """Names the engines, the load and the rates that a contender is made for."""

    setup: Setup
    load: Sequence[SimulatedRequest]
    rates: EngineRates
    """Rates as an earlier run has measured them."""
    cached: float
    """The share of prompt tokens that is cached."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An autoscaler with the settings of its knob."""

    name: str
    knobs: Sequence[float]
    make: Callable[[float, Case], Scaler]


CONTENDERS = (
    Contender("planner", (0.9, 0.95, 0.97, 0.99), lambda knob, case: Planner(case.setup, knob)),
    Contender("HPA, queue", (8, 3, 1, 0.4), lambda knob, case: Hpa(knob)),
    Contender("KEDA", (96, 48, 24, 12, 6), lambda knob, case: Hpa(knob, whole=True)),
    Contender("llm-d", (1, 3, 4, 4.7), lambda knob, case: Saturation(0.1 + 0.2 * max(0.0, knob - 3), knob)),
    Contender(
        "oracle",
        (1.4, 1.2, 1.0, 0.9, 0.8, 0.65, 0.5, 0.4),
        lambda knob, case: Oracle(case.setup, case.load, knob, case.rates, case.cached),
    ),
    Contender(
        "oracle without warning",
        (1.4, 1.2, 1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.15),
        lambda knob, case: Oracle(case.setup, case.load, knob, case.rates, case.cached, is_warned=False),
    ),
)


def at_cost(points: Sequence[tuple[float, float]], gpu_hours: float) -> float:
    """Returns the best share that these (GPU-hours, share) reach for no more than `gpu_hours`, between two settings by
    interpolation. Below the cheapest setting it is that of the cheapest in proportion.
    """
    ordered = sorted(points)
    best = 0.0
    for (cost, share), (next_cost, next_share) in itertools.pairwise(ordered):
        if cost <= gpu_hours:
            best = max(best, share)
        if cost <= gpu_hours < next_cost:
            best = max(best, share + (next_share - share) * (gpu_hours - cost) / (next_cost - cost))
    cheapest, last = ordered[0], ordered[-1]
    if gpu_hours < cheapest[0]:
        return cheapest[1] * gpu_hours / cheapest[0]
    return max(best, last[1]) if last[0] <= gpu_hours else best


def measure(name: str, load: Sequence[SimulatedRequest], until_s: float) -> dict[str, Any]:
    """Returns the figures of one load."""
    found: dict[str, Any] = {"requests": len(load), "runs": {}}
    setup = FIFTH if name.startswith("mooncake") else TENTH
    case = Case(setup, load, EngineRates(), 0.0)
    for contender in CONTENDERS:
        runs = found["runs"].setdefault(contender.name, [])
        for knob in contender.knobs:
            if time.monotonic() > until_s:
                break
            fleet = ScaledFleet(setup, contender.make(knob, case), FIRST)
            outcome = fleet.run(load)
            if not runs and contender is CONTENDERS[0]:
                case = Case(setup, load, fleet.measured_rates, fleet.cached_share)
            runs.append(
                {
                    "knob": knob,
                    "attainment": round(outcome.attainment, 4),
                    "gpu_hours": round(outcome.gpu_hours, 2),
                    "turns": outcome.turns,
                    "changes": outcome.changes,
                    "most": outcome.most,
                }
            )
            print(f"{name:18} {contender.name:10} {runs[-1]}", flush=True)
    return found | {"equal_cost": equal_cost(found["runs"])}


def equal_cost(runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Returns the share of each autoscaler at the GPU-hours of the planner's default."""
    default = next((one for one in runs.get("planner", ()) if one["knob"] == DEFAULT_PERCENTILE), None)
    if default is None:
        return {}
    hours = default["gpu_hours"]
    shares = {
        name: round(at_cost([(one["gpu_hours"], one["attainment"]) for one in found], hours), 4)
        for name, found in runs.items()
        if found
    }
    return {"gpu_hours": hours, **shares, "planner": default["attainment"]}


def main() -> None:
    """Runs all, prints a line for each run, and writes the JSON after each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, written again after every load")
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER", help="the traces")
    parser.add_argument("--loads", default="", metavar="A;B", help="names of loads, such as 'azure;azure, bursts'")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each load (default: 60)")
    parser.add_argument("--time-limit-s", type=float, default=86_400, metavar="S", help="begin nothing new after that")
    options = parser.parse_args()
    until_s, results = time.monotonic() + options.time_limit_s, dict[str, Any]()
    chosen = [name.strip() for name in options.loads.split(";") if name.strip()]
    for name, whole in [*all_loads(options.data), ("noise", noise())]:
        load = [request for request in whole if request.arrival_s < 60 * options.minutes]
        if not chosen or name in chosen:
            results[name] = measure(name, load, until_s)
            print(f"{name:18} {results[name]['equal_cost']}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
