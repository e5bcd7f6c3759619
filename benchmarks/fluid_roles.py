"""Prefill and decode engines that switch roles under the planner, beside every fixed split of as many engines.

Each fleet has one number of engines all the hour, so all cost the same GPU-hours; the planner is the operator's own,
with a GPU budget of that number. Engines and loads are those of benchmarks/autoscaling.py, here always prefill and
decode apart. Needs the traces of ../shared/data; leaves out those that are absent.
"""

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.autoscaling import DATA, FIFTH, TENTH, at_cost
from benchmarks.routing.workload import SimulatedRequest
from benchmarks.scaling.fleet import Setup
from benchmarks.scaling.loads import agents, all_loads, azure, in_turn
from benchmarks.scaling.pair_fleet import PairFleet, PairOutcome
from mini_infer_operator.scaling.pair_planner import split_between_roles
from mini_infer_operator.scaling.plan_state import DECODE, PREFILL, Fleet, Memory
from mini_infer_operator.scaling.planner import plan_replicas
from mini_infer_operator.scaling.policy import ScalingPolicy, Targets
from mini_infer_operator.scaling.signals import EngineRates, Sample

SCALED_MODES, PERCENTILES = ("switch", "apart", "0.6", "0.7", "0.8"), (0.95, 0.99)
LOADS = ("azure, bursts", "agents, bursts", "azure and agents in turn")


@dataclass(frozen=True, slots=True)
class FixedSplit:
    """Keeps the roles that engines have."""

    def split(self, sample: Sample, rates: EngineRates, fleets: Mapping[str, Fleet]) -> Mapping[str, int]:
        """Returns the present numbers."""
        return {role: fleet.replicas for role, fleet in fleets.items()}


@dataclass(slots=True)
class PlannedSplit:
    """The planner's split of a granted number, as the operator makes it (controller/scaling.py)."""

    setup: Setup
    memory: Memory = field(default_factory=Memory)

    def split(self, sample: Sample, rates: EngineRates, fleets: Mapping[str, Fleet]) -> Mapping[str, int]:
        """Returns the planner's numbers."""
        total = sum(fleet.replicas for fleet in fleets.values())
        policy = ScalingPolicy(1, total, Targets(self.setup.ttft_s, self.setup.itl_s))
        policies, switched_s = dict.fromkeys(fleets, policy), self.memory.switched_s
        found, planned = plan_replicas(
            policies, fleets, sample, rates, self.memory, self.setup.start_s, are_roles_interchangeable=True
        )
        planned = replace(planned, switched_s=switched_s)  # its own split is of a number that is not granted
        counts, self.memory = split_between_roles(total, found, fleets, planned, sample.at_s)
        return counts


@dataclass(slots=True)
class ScaledPair:
    """The planner with engines that start and stop; roles switch, are planned apart, or have a fixed share."""

    setup: Setup
    percentile: float
    mode: str = "switch"
    """`switch`, `apart`, or the share of prefill engines in the planner's sum."""
    memory: Memory = field(default_factory=Memory)

    def split(self, sample: Sample, rates: EngineRates, fleets: Mapping[str, Fleet]) -> Mapping[str, int]:
        """Returns the planner's numbers."""
        policy = ScalingPolicy(1, self.setup.most, Targets(self.setup.ttft_s, self.setup.itl_s, self.percentile))
        found, self.memory = plan_replicas(
            dict.fromkeys(fleets, policy),
            fleets,
            sample,
            rates,
            self.memory,
            self.setup.start_s,
            are_roles_interchangeable=self.mode != "apart",
        )
        counts = {role: one.replicas for role, one in found.items()}
        if self.mode in ("switch", "apart"):
            return counts
        total = max(sum(counts.values()), 2)
        prefill = max(1, min(total - 1, round(float(self.mode) * total)))
        return {PREFILL: prefill, DECODE: total - prefill}


def figures(outcome: PairOutcome) -> dict[str, Any]:
    """Returns one run for the JSON."""
    return {
        "attainment": round(outcome.attainment, 4),
        "ttft": round(outcome.kept_ttft / outcome.requests, 4),
        "itl": round(outcome.kept_itl / outcome.requests, 4),
        "switches": outcome.switches,
        "gpu_hours": round(outcome.gpu_hours, 2),
    }


def measure(name: str, load: Sequence[SimulatedRequest], total: int, until_s: float) -> dict[str, Any]:
    """Returns the figures of one load on so many engines: fluid, and with each fixed split."""
    setup = FIFTH if name.startswith("mooncake") else TENTH
    runs: dict[str, Any] = {}
    for prefill in (0, *range(1, total)):
        if time.monotonic() > until_s:
            break
        label = f"{prefill}:{total - prefill}" if prefill else "fluid"
        splitter = FixedSplit() if prefill else PlannedSplit(setup)
        begin = prefill or total // 2
        runs[label] = figures(PairFleet(setup, splitter, begin, total - begin).run(load))
        print(f"{name:18} {total:3} engines, {label:6} {runs[label]}", flush=True)
    fixed = {label: run["attainment"] for label, run in runs.items() if label != "fluid"}
    best = max(fixed, key=lambda label: fixed[label], default="")
    gain = round(runs["fluid"]["attainment"] - fixed[best], 4) if best else None
    print(f"{name:18} {total:3} engines: {gain} above {best}", flush=True)
    return {"requests": len(load), "engines": total, "runs": runs, "best_fixed": best, "gain": gain}


def measure_scaled(name: str, load: Sequence[SimulatedRequest], until_s: float) -> dict[str, Any]:
    """Returns the figures of one load on engines that the planner starts and stops, too."""
    setup, runs = FIFTH if name.startswith("mooncake") else TENTH, dict[str, dict[float, dict[str, Any]]]()
    for mode in SCALED_MODES:
        for percentile in PERCENTILES if time.monotonic() < until_s else ():
            outcome = PairFleet(setup, ScaledPair(setup, percentile, mode), 3, 2).run(load)
            runs.setdefault(mode, {})[percentile] = figures(outcome)
            print(f"{name:18} scaled, {mode:6} {percentile} {runs[mode][percentile]}", flush=True)
    hours = runs["switch"][PERCENTILES[0]]["gpu_hours"]
    points = {mode: [(one["gpu_hours"], one["attainment"]) for one in found.values()] for mode, found in runs.items()}
    equal = {mode: round(at_cost(found, hours), 4) for mode, found in points.items()}
    print(f"{name:18} at {hours} GPU-h: {equal}", flush=True)
    return {"requests": len(load), "runs": runs, "gpu_hours": hours, "equal_cost": equal}


def main() -> None:
    """Runs all, prints a line for each run, and writes the JSON after each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, written again after every load")
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER", help="the traces")
    parser.add_argument("--loads", default=";".join(LOADS), metavar="A;B", help="names of loads (default: %(default)s)")
    parser.add_argument("--engines", default="8,12", metavar="N,N", help="numbers of engines (default: %(default)s)")
    parser.add_argument(
        "--scaled", action="store_true", help="let the planner set the number, too, in place of --engines"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of each load (default: 60)")
    parser.add_argument("--time-limit-s", type=float, default=86_400, metavar="S", help="begin nothing new after that")
    options = parser.parse_args()
    until_s, results = time.monotonic() + options.time_limit_s, list[dict[str, Any]]()
    chosen = [name.strip() for name in options.loads.split(";")]
    loads = dict(all_loads(options.data))
    if {"azure", "agents"} <= loads.keys():
        loads["azure and agents in turn"] = in_turn(azure(options.data), agents(options.data, 600))
    for name in (name for name in loads if name in chosen):
        load = [request for request in loads[name] if request.arrival_s < 60 * options.minutes]
        if options.scaled:
            found: Iterable[dict[str, Any]] = (measure_scaled(name, load, until_s),)
        else:
            found = (measure(name, load, total, until_s) for total in map(int, options.engines.split(",")))
        for result in found:
            results.append({"load": name, **result})
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
