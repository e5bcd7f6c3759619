"""Prefill and decode engines that switch roles under the planner, beside every fixed split of as many engines.

Each fleet has one number of engines all the hour, so all cost the same GPU-hours; the planner is the operator's own,
with a GPU budget of that number. Engines and loads are those of benchmarks/autoscaling.py, here always prefill and
decode apart. Needs the traces of ../shared/data; leaves out those that are absent.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.autoscaling import DATA, FIFTH, TENTH
from benchmarks.routing.workload import SimulatedRequest
from benchmarks.scaling.fleet import Setup
from benchmarks.scaling.loads import agents, all_loads, azure, in_turn
from benchmarks.scaling.pair_fleet import PairFleet, PairOutcome
from mini_infer_operator.scaling.pair_planner import split_between_roles
from mini_infer_operator.scaling.plan_state import DECODE, PREFILL, Fleet, Memory
from mini_infer_operator.scaling.planner import plan_replicas
from mini_infer_operator.scaling.policy import ScalingPolicy, Targets
from mini_infer_operator.scaling.signals import EngineRates, Sample

LOADS = ("azure, bursts", "agents, bursts", "azure and agents in turn")


@dataclass(frozen=True, slots=True)
class FixedSplit:
    """Keeps the roles that engines have."""

    def split(self, sample: Sample, rates: EngineRates, prefill: int, decode: int) -> tuple[int, int]:
        """Returns the present numbers."""
        return prefill, decode


@dataclass(slots=True)
class PlannedSplit:
    """The planner's split of a granted number, as the operator makes it (controller/scaling.py)."""

    setup: Setup
    memory: Memory = field(default_factory=Memory)

    def split(self, sample: Sample, rates: EngineRates, prefill: int, decode: int) -> tuple[int, int]:
        """Returns the planner's numbers."""
        total = prefill + decode
        policy = ScalingPolicy(1, total, Targets(self.setup.ttft_s, self.setup.itl_s))
        fleets = {PREFILL: Fleet(prefill, prefill), DECODE: Fleet(decode, decode)}
        policies = dict.fromkeys(fleets, policy)
        switched_s = self.memory.switched_s
        found, planned = plan_replicas(
            policies, fleets, sample, rates, self.memory, self.setup.start_s, are_roles_interchangeable=True
        )
        planned = replace(planned, switched_s=switched_s)  # its own split is of a number that is not granted
        counts, self.memory = split_between_roles(total, found, fleets, planned, sample.at_s)
        return counts[PREFILL], counts[DECODE]


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
    return {"requests": len(load), "engines": total, "runs": runs, "best_fixed": best, "gain": gain}


def main() -> None:
    """Runs all, prints a line for each run, and writes the JSON after each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, written again after every load")
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER", help="the traces")
    parser.add_argument("--loads", default=";".join(LOADS), metavar="A;B", help="names of loads (default: %(default)s)")
    parser.add_argument("--engines", default="8,12", metavar="N,N", help="numbers of engines (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each load (default: 60)")
    parser.add_argument("--time-limit-s", type=float, default=86_400, metavar="S", help="begin nothing new after that")
    options = parser.parse_args()
    until_s, results = time.monotonic() + options.time_limit_s, list[dict[str, Any]]()
    chosen = [name.strip() for name in options.loads.split(";")]
    loads = dict(all_loads(options.data))
    if {"azure", "agents"} <= loads.keys():
        loads["azure and agents in turn"] = in_turn(azure(options.data), agents(options.data, 600))
    for name, whole in loads.items():
        load = [request for request in whole if request.arrival_s < 60 * options.minutes]
        for total in map(int, options.engines.split(",")) if name in chosen else ():
            results.append({"load": name, **measure(name, load, total, until_s)})
            print(f"{name:18} {total:3} engines: {results[-1]['gain']} above {results[-1]['best_fixed']}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
