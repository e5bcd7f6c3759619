"""`python -m benchmarks.routing.apart`: prefill engines beside decode engines, against the same number of unified ones.

The gateway's part is the real one, pairing included; engines are the models of `python -m benchmarks.routing`. The same
requests are given to fleets of one size: all unified; a share of prefill engines with the learned rule; and with the
rule replaced by always, never, or a number of tokens. What counts is goodput: the share of requests whose first token
and whose mean time per further token both keep their targets.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.routing.__main__ import make_workload
from benchmarks.routing.engine_model import EngineShape
from benchmarks.routing.figures import capacity_s, gap_s, output_rate, quantile, within
from benchmarks.routing.our_gateway import Keys, OurGateway
from benchmarks.routing.rates import QWEN_7B_H200
from benchmarks.routing.workload import Workload, find_mooncake
from benchmarks.routing.world import World

CACHE_TOKENS = 500_000
FIRST_TOKEN_S, PER_TOKEN_S = 1.0, 0.012
"""Three times a decode pass of a 7B model with some rows, and what a chat's user waits for without noticing."""
RULES: dict[str, int | None] = {"learned": None, "always": 0, "never": 1 << 30, "512": 512, "2048": 2048}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One fleet under one load."""

    workload: str
    engines: int
    prefill: int
    rule: str
    load: float
    transfer_tokens_per_s: float
    goodput: float
    ttft_p50_s: float
    ttft_p90_s: float
    gap_p50_s: float
    gap_p99_s: float
    output_tokens_s: float
    apart: float
    """Share of requests whose prompt was computed apart."""

    def as_json(self) -> dict[str, Any]:
        """Figures to four digits."""
        return {name: float(f"{it:.4g}") if isinstance(it, float) else it for name, it in asdict(self).items()}

    @property
    def fleet(self) -> str:
        """For people."""
        if not self.prefill:
            return f"{self.engines} unified"
        return f"{self.prefill} prefill, {self.engines - self.prefill} decode, {self.rule}"


def run(workload: Workload, engines: int, prefill: int, rule: str, load: float, transfer: float, keys: Keys) -> Outcome:
    """One fleet; `workload` at any speed, it is brought to the load."""
    shape = EngineShape(CACHE_TOKENS // workload.block_tokens, workload.block_tokens, QWEN_7B_H200)
    whole_s = capacity_s(workload, shape.rates, engines, shape.kv_blocks, shape.max_num_seqs)
    world = World(
        shape,
        engines,
        lambda world: OurGateway(world, keys, "prefix", max_local_prefill_tokens=RULES[rule]),
        prefill_count=prefill,
        transfer_tokens_per_s=transfer,
    )
    answers = world.run(workload.at(whole_s / load))
    waits = sorted(answer.first_token_s - answer.request.arrival_s for answer in answers)
    gaps = [gap for engine in world.engines[prefill:] for gap in engine.gaps]
    return Outcome(
        workload=workload.name,
        engines=engines,
        prefill=prefill,
        rule=rule,
        load=load,
        transfer_tokens_per_s=transfer,
        goodput=within(answers, FIRST_TOKEN_S, PER_TOKEN_S),
        ttft_p50_s=quantile(waits, 0.5),
        ttft_p90_s=quantile(waits, 0.9),
        gap_p50_s=gap_s(gaps, 0.5),
        gap_p99_s=gap_s(gaps, 0.99),
        output_tokens_s=output_rate(answers),
        apart=sum(answer.prefill is not None for answer in answers) / len(answers),
    )


def outcomes(options: argparse.Namespace) -> Iterator[Outcome]:
    """Every fleet under every load."""
    trace = find_mooncake(options.trace)
    for name in options.workloads.split(","):
        if (workload := make_workload(name, options.engines, trace)) is None:
            print(f"left out: {name} (no trace; see python -m benchmarks.routing --help)", flush=True)
            continue
        keys = Keys()
        for load in map(float, options.loads.split(",")):
            yield run(workload, options.engines, 0, "learned", load, options.transfer, keys)
            for prefill in map(int, options.prefill.split(",")):
                for rule in options.rules.split(","):
                    yield run(workload, options.engines, prefill, rule, load, options.transfer, keys)


def line(of: Outcome) -> str:
    """One run for people."""
    return (
        f"{of.workload:10} load {of.load:4g}  {of.fleet:32} goodput {of.goodput:.3f}  TTFT p50 {of.ttft_p50_s:7.3f}"
        f"  p90 {of.ttft_p90_s:7.3f} s  gaps p50 {1e3 * of.gap_p50_s:5.1f}  p99 {1e3 * of.gap_p99_s:6.1f} ms"
        f"  output {of.output_tokens_s:6.0f} tok/s  apart {of.apart:.2f}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing.apart", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write every result there")
    parser.add_argument("--engines", type=int, default=4, help="of a fleet, prefill engines included (%(default)s)")
    parser.add_argument("--prefill", default="1", help="how many of them, such as 1,2 (%(default)s)")
    parser.add_argument("--rules", default=",".join(RULES), help="of: %(default)s")
    parser.add_argument("--loads", default="0.3,0.5,0.7,0.9,1.2", help="(%(default)s)")
    parser.add_argument("--workloads", default="mooncake,sessions,zero reuse", help="of: %(default)s")
    parser.add_argument("--transfer", type=float, default=1e6, help="tokens of KV cache a second (%(default)g)")
    parser.add_argument("--trace", metavar="FILE", help="the recorded trace")
    options = parser.parse_args(arguments)
    if unknown := set(options.rules.split(",")) - RULES.keys():
        parser.error(f"--rules: {sorted(unknown)} are not known; choose of {', '.join(RULES)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all and prints a line each."""
    options = parse(arguments)
    found = []
    for outcome in outcomes(options):
        found.append(outcome)
        print(line(outcome), flush=True)
        if options.json:
            rows = ",\n".join(json.dumps(one.as_json()) for one in found)
            Path(options.json).write_text(f"[\n{rows}\n]\n")


if __name__ == "__main__":
    sys.exit(main())
