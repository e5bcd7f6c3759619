"""`python -m benchmarks.routing`: see --help."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.routing import grid
from benchmarks.routing.agents import agents
from benchmarks.routing.our_gateway import Keys
from benchmarks.routing.recorded_agents import recorded_agents
from benchmarks.routing.workload import (
    TRACE_FILE,
    TRACE_VARIABLE,
    Workload,
    find_mooncake,
    mooncake,
    sessions,
    zero_reuse,
)

DESCRIPTION = """\
Simulates how requests are routed to engines, and compares the gateway with other projects' rules.

The gateway's part is the real one: Router, PrefixIndex, LoadLedger. Engines are models of ours: its page, LRU and
batching rules (a test compares them with the real scheduler), with the pass times measured for a 7B model on one H200.
The other rules are re-told from their source. llm-d's, Dynamo's and the plain ones see every engine exactly and without
delay, which flatters them; sglang's and lmetric know what they sent, as their code does. A request whose engine dies is
sent anew, which most of them leave to clients.

A load of 1.0 is what the engines could do if they were always busy and every attainable prefix hit were found."""

EPILOG = f"""\
The recorded trace is Mooncake's conversation trace ({TRACE_FILE}, github.com/kvcache-ai/Mooncake); it is not part of
this repository. It is looked for at --trace, in ${TRACE_VARIABLE}, and in shared/data beside the checkout; without it
only the generated workloads run, and a line says so.

examples:
  python -m benchmarks.routing                                  the reduced grid, in about a minute
  python -m benchmarks.routing --full --json routing.json       everything, in an hour of one core
  python -m benchmarks.routing --engines 8 --loads 1.0,1.3 --workloads sessions --policies mini-infer,llm-d"""

REQUESTS_PER_ENGINE, MOST_REQUESTS = 200, 12_031
RECORDED_COPIES = 1
"""Of all recorded sessions, for each engine."""
AGENT_REQUESTS_PER_ENGINE = 1500
"""So many that most jobs begin and end in the middle of the run."""
WORKLOADS = ("mooncake", "sessions", "agents", "zero reuse")
MORE_WORKLOADS = (grid.RECORDED,)
"""Only where --workloads names them."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write every result there, after each situation")
    parser.add_argument("--full", action="store_true", help="every size, cache and load instead of the reduced grid")
    parser.add_argument("--trace", metavar="FILE", help="the recorded trace (.jsonl or .jsonl.xz)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"of: %(default)s, {grid.RECORDED}")
    parser.add_argument("--engines", help="only situations with so many engines, such as 8,16")
    parser.add_argument("--loads", help="these loads instead of the grid's, such as 0.9,1.3")
    parser.add_argument("--cache-tokens", help="only situations with these caches, such as 500000")
    parser.add_argument("--host-times", type=float, help="main memory of engines, over their caches: 4")
    parser.add_argument("--index", choices=("exact", "approximate"), help="only situations with this index")
    parser.add_argument("--gateways", type=int, help="only situations with so many gateways")
    parser.add_argument("--fleet", choices=grid.FLEETS, help="this fleet instead of the grid's")
    every = ",".join((grid.OURS, *grid.REFERENCES))
    parser.add_argument("--policies", default=every, help="of: %(default)s")
    return parser.parse_args(arguments)


def make_workload(name: str, engines: int, trace: Path | None) -> Workload | None:
    """The requests of a situation: enough to fill this many engines' caches; None: the trace is absent."""
    count = min(MOST_REQUESTS, 1000 + REQUESTS_PER_ENGINE * engines)
    if name == "mooncake":
        return mooncake(trace, count) if trace else None
    if name == grid.RECORDED:
        return recorded_agents(RECORDED_COPIES * engines)
    if name == "agents":
        return agents(AGENT_REQUESTS_PER_ENGINE * engines)
    return zero_reuse(count) if name == "zero reuse" else sessions(count)


def chosen_cells(options: argparse.Namespace) -> list[grid.Cell]:
    """The grid, narrowed by flags."""
    names = options.workloads.split(",")
    if unknown := set(names) - {*WORKLOADS, *MORE_WORKLOADS}:
        known = ", ".join((*WORKLOADS, *MORE_WORKLOADS))
        raise SystemExit(f"--workloads: {sorted(unknown)} are not known; choose of {known}")
    cells = grid.full_grid(names) if options.full or options.engines else grid.reduced_grid(names)
    if options.engines:
        selected = {int(value) for value in options.engines.split(",")}
        cells = [cell for cell in cells if cell.engines in selected]
    if options.cache_tokens:
        selected = {int(value) for value in options.cache_tokens.split(",")}
        cells = [cell for cell in cells if cell.cache_tokens in selected]
    if options.index:
        cells = [cell for cell in cells if cell.index == options.index]
    if options.gateways:
        cells = [cell for cell in cells if cell.gateways == options.gateways]
    if options.host_times is not None:
        cells = list(dict.fromkeys(replace(cell, host_times=options.host_times) for cell in cells))
    if options.fleet:
        cells = list(dict.fromkeys(replace(cell, fleet=options.fleet) for cell in cells))
    if options.loads:
        loads = [float(value) for value in options.loads.split(",")]
        series = dict.fromkeys(replace(cell, load=loads[0]) for cell in cells)
        cells = [replace(cell, load=load) for cell in series for load in loads]
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the grid, prints a line a run, and ends with what missed its bar (exit status 1)."""
    options = parse(arguments)
    trace = find_mooncake(options.trace)
    if options.trace and trace is None:
        raise SystemExit(f"--trace: there is no file {options.trace}")
    policies = options.policies.split(",")
    if unknown := set(policies) - {grid.OURS, *grid.REFERENCES}:
        names = ", ".join((grid.OURS, *grid.REFERENCES))
        raise SystemExit(f"--policies: {sorted(unknown)} are not known; choose of {names}")
    keys = {name: Keys() for name in (*WORKLOADS, *MORE_WORKLOADS)}
    workloads: dict[tuple[str, int], Workload | None] = {}
    results: list[grid.Result] = []
    for cell in chosen_cells(options):
        at = (cell.workload, cell.engines)
        if at not in workloads:
            workloads[at] = make_workload(cell.workload, cell.engines, trace)
            if workloads[at] is None:
                print(f"left out: {cell.workload}, {cell.engines} engines (no {TRACE_FILE}; see --help)", flush=True)
        if (workload := workloads[at]) is None:
            continue
        print(cell.label)
        began = time.perf_counter()
        for result in grid.run_cell(cell, workload, policies, keys[cell.workload]):
            results.append(result)
            print(line(result), f"[{time.perf_counter() - began:.1f} s]", flush=True)
            began = time.perf_counter()
        if options.json:
            rows = ",\n".join(json.dumps(item.as_json()) for item in results)
            Path(options.json).write_text(f"[\n{rows}\n]\n")
    if grid.OURS in policies and len(policies) > 1:
        missed = grid.missed_bars(results)
        print("\n".join(["", f"{len(missed)} bars missed", *missed]))
        sys.exit(1 if missed else 0)


def line(result: grid.Result) -> str:
    """One run for people."""
    of = result.figures
    return (
        f"  {result.policy:18} TTFT mean {of.ttft_mean_s:8.3f}  p50 {of.ttft_p50_s:8.3f}  p90 {of.ttft_p90_s:8.3f} s"
        f"  output {of.output_tokens_s:8.0f} tok/s  reuse {of.reuse:.3f}  from host {of.host_share:.3f}"
        f"  imbalance {of.imbalance:.2f}  jobs p50 {of.job_p50_s:.0f} p90 {of.job_p90_s:.0f} s"
    )


if __name__ == "__main__":
    main()
