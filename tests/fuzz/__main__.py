"""Attacks a gateway, two engines and a prefill/decode pair in every way that this folder knows, beside healthy clients.

    python -m tests.fuzz                              # 15 minutes
    python -m tests.fuzz --minutes 1 --seed 7
    python -m tests.fuzz --attackers schemas,transfers

It first measures healthy clients alone, then beside the attackers. It prints what each attacker got, the healthy
clients' waits and the memory of each part, and exits with 1 where a process ended, memory grew, a healthy client got
another text or an error, or a request got no answer.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.fleet import Fleet, running_fleet
from tests.fuzz.healthy import Healthy
from tests.fuzz.hostile import (
    cluster_objects,
    connections,
    endpoint,
    endpoints_file,
    http_requests,
    kv_params,
    schemas,
    sockets,
    transfers,
)
from tests.fuzz.hostile.load import Findings
from tests.fuzz.watch import Watch

Attack = Callable[[Fleet, Random, Findings], Coroutine[Any, Any, None]]
ATTACKERS: dict[str, Attack] = {
    "http": http_requests.attack,
    "connections": connections.attack,
    "schemas": schemas.attack,
    "zmq": sockets.attack,
    "transfers": transfers.attack,
    "kv_params": kv_params.attack,
    "endpoint": endpoint.attack,
    "endpoints_file": endpoints_file.attack,
    "objects": cluster_objects.attack,
}
QUIET_SHARE, QUIET_MOST_S = 0.15, 60.0
"""How long healthy clients are alone: a share of the whole time, and at most so long."""
WAIT_LIMIT = 2.0
"""Healthy clients' p99 beside the attackers may be this many times that of the quiet fleet."""


def main() -> int:
    """Runs the fuzz and returns the exit status."""
    faulthandler.enable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the fleet ends with it
    sys.setrecursionlimit(20_000)  # hostile schemas are deep, and have to be written as JSON
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # the hostile endpoint's clients leave it in mid-answer
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="the quiet part included (default: 15)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="(default: the time)")
    parser.add_argument("--attackers", default=",".join(ATTACKERS), help="some of them (default: all)")
    parser.add_argument("--clients", type=int, default=2, help="healthy ones (default: 2)")
    parser.add_argument("--pace", type=float, default=1.0, help="attackers pause this many times as long (default: 1)")
    parser.add_argument("--no-wait-limit", action="store_true", help="only print the waits: for busy machines")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    chosen = options.attackers.split(",")
    if unknown := set(chosen) - set(ATTACKERS):
        parser.error(f"no attacker is called {sorted(unknown)[0]!r}; there are {', '.join(ATTACKERS)}")
    print(f"seed {options.seed}; the fleet starts", flush=True)
    with running_fleet(options.seed) as fleet:
        fleet.pace = options.pace
        with contextlib.suppress(OSError):
            os.nice(5)  # attackers share the machine with what they attack
        report = asyncio.run(_run(fleet, options, chosen))
    for line in _lines(report):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["wrong"] else 0


async def _run(fleet: Fleet, options: argparse.Namespace, chosen: list[str]) -> dict[str, Any]:
    found = Findings()
    total_s = options.minutes * 60
    quiet_s = min(QUIET_MOST_S, total_s * QUIET_SHARE)
    quiet = Healthy(fleet, found)
    await _for(quiet_s, [quiet.run(Random(f"{options.seed}:quiet:{i}")) for i in range(options.clients)])
    print(f"quiet: p50 {quiet.percentile(0.5):.3f} s, p99 {quiet.percentile(0.99):.3f} s", flush=True)
    beside = Healthy(fleet, found, expected=quiet.expected)
    watch = Watch(fleet, found)
    attacks = [ATTACKERS[name](fleet, Random(f"{options.seed}:{name}"), found) for name in chosen]
    clients = [beside.run(Random(f"{options.seed}:healthy:{i}")) for i in range(options.clients)]
    await _for(total_s - quiet_s, [*attacks, *clients, watch.run(), _progress(found, beside)])
    memory = {name: watch.growth(name) for name in fleet.processes}
    for name in fleet.processes:
        if watch.grew(name):
            early, late = memory[name]
            found.note(f"memory of {name} grew from {early >> 20} to {late >> 20} MiB")
    ratio = beside.percentile(0.99) / max(1e-9, quiet.percentile(0.99))
    if ratio > WAIT_LIMIT and not options.no_wait_limit:
        found.note(f"healthy clients' p99 is {ratio:.1f} times that of the quiet fleet")
    return {
        "seed": options.seed,
        "minutes": options.minutes,
        "outcomes": dict(sorted(found.outcomes.items())),
        "quiet_s": {"p50": quiet.percentile(0.5), "p99": quiet.percentile(0.99), "requests": len(quiet.waits_s)},
        "beside_s": {"p50": beside.percentile(0.5), "p99": beside.percentile(0.99), "requests": len(beside.waits_s)},
        "p99_ratio": ratio,
        "memory_mib": {name: [early >> 20, late >> 20] for name, (early, late) in memory.items()},
        "workers_replaced": watch.replaced_workers,
        "wrong": found.wrong,
    }


async def _for(seconds: float, coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """Runs all for so long; an error of one of them is an error of the run."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _progress(found: Findings, beside: Healthy) -> None:
    """Prints every half a minute how far the run is, and each fault once."""
    printed = 0
    while True:
        await asyncio.sleep(30)
        for line in found.wrong[printed:]:
            print(line[:1000], flush=True)
        printed = len(found.wrong)
        attempts = sum(found.outcomes.values())
        print(
            f"{attempts} attempts, {len(beside.waits_s)} healthy answers, p99 {beside.percentile(0.99):.3f} s, "
            f"{len(found.wrong)} wrong",
            flush=True,
        )


def _lines(report: dict[str, Any]) -> list[str]:
    quiet, beside = report["quiet_s"], report["beside_s"]
    return [
        *(f"{name}: {count}" for name, count in report["outcomes"].items()),
        f"healthy clients alone: p50 {quiet['p50']:.3f} s, p99 {quiet['p99']:.3f} s of {quiet['requests']} requests",
        f"beside the attackers: p50 {beside['p50']:.3f} s, p99 {beside['p99']:.3f} s of {beside['requests']} requests, "
        f"p99 {report['p99_ratio']:.2f} times",
        *(f"memory of {name}: {early} to {late} MiB" for name, (early, late) in report["memory_mib"].items()),
        f"workers replaced: {report['workers_replaced']}",
        f"{len(report['wrong'])} wrong",
        *report["wrong"][:30],
    ]


if __name__ == "__main__":
    sys.exit(main())
