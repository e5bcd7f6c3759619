"""A long day on a real node: canaries, cycles of zero, two autoscalers, models on the node, and losses of everything.

    E2E_NODE=... E2E_BUILD=... python -m tests.e2e.long_day --minutes 60 --out FILE

makes a cluster with our images. A service of two engines is under load from the beginning to the end, while the parts
run one after the other; each has a service of its own. Steps of the day (soak.py, losses.py: edits, drains, kills) come
between the parts, and fill the time that is left. Requests that break with a killed gateway are counted apart. It ends
with 1 if any other request failed, or a part did not do what it should. `--parts` chooses some.
"""

import argparse
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.canary import add_flags
from benchmarks.common.report import save, words
from tests.e2e.autoscalers import autoscalers
from tests.e2e.canaries import canaries
from tests.e2e.cluster import Cluster, NodeCluster
from tests.e2e.commands import log_line
from tests.e2e.images import NAMES, build_image
from tests.e2e.load import CONNECTIONS, OpenLoad
from tests.e2e.losses import Losses
from tests.e2e.model_caches import model_caches
from tests.e2e.model_images import model_images
from tests.e2e.noise import noise
from tests.e2e.release import RELEASE, SYSTEM, Release
from tests.e2e.soak import NAME, Service
from tests.e2e.zero import zero_cycles

PARTS = ("images", "caches", "zero", "autoscalers", "noise", "canaries", "day")
RELEASE_VALUES = {"operator.replicas": "2", "engine.podSecurity.profile": "privileged"}
"""Two operators, of which one may be lost; a cache in a folder of the node is a hostPath."""
STEPS_BETWEEN_PARTS = 4
SETTLE_S = 3.0
"""After a gateway was killed: so long its requests may still be found to be broken."""


class Day:
    """What was seen so far, beside the load."""

    def __init__(self, load: OpenLoad, out: Path | None) -> None:
        self._load, self._out = load, out
        self.result: dict[str, Any] = {"parts": {}, "steps": [], "wrong": [], "broken_with_a_gateway": 0}

    def part(self, name: str, run: Callable[[], tuple[dict[str, Any], int]]) -> None:
        """Runs a part; a failure of it is noted, and the day goes on."""
        begun_s, failed = time.monotonic(), self._failed()
        try:
            found, code = run()
        except Exception:
            found, code = {"error": traceback.format_exc()}, 1
            log_line(found["error"])
        found |= {"took_s": round(time.monotonic() - begun_s, 1), "failed_beside": self._failed() - failed}
        self.result["parts"][name] = found
        if code:
            self.result["wrong"].append(name)
        log_line(f"{name}: {'wrong' if code else 'as it should be'}, {found['took_s']} s; {self._load.result.line()}")
        self.save()

    def step(self, step: Callable[[], None], *, breaks_requests: bool = False) -> None:
        """Runs a step of the day."""
        begun_s, failed, error = time.monotonic(), self._failed(), ""
        try:
            step()
        except Exception:
            error = traceback.format_exc()
            self.result["wrong"].append(step.__name__)
            log_line(error)
        time.sleep(SETTLE_S)
        broken = self._failed() - failed
        took_s = round(time.monotonic() - begun_s, 1)
        self.result["steps"].append({"step": step.__name__, "took_s": took_s, "failed": broken, "error": error})
        if breaks_requests:
            self.result["broken_with_a_gateway"] += broken
            if broken > CONNECTIONS:
                self.result["wrong"].append(f"{step.__name__}: {broken} requests")
        log_line(f"{step.__name__}: {took_s} s, {broken} requests failed")
        self.save()

    def _failed(self) -> int:
        return self._load.result.failures.total()

    def save(self) -> None:
        """Writes what was seen."""
        load = self._load.result
        self.result |= {"requests": load.done, "failures": dict(load.failures), "load": load.line()}
        save(self._out, self.result)

    def code(self) -> int:
        """Returns 0 if all was as it should be."""
        refused = [failure for failure in self._load.result.failures if failure[:3].isdigit()]
        others = self._failed() - self.result["broken_with_a_gateway"]
        return 1 if self.result["wrong"] or refused or others else 0


def run_day(cluster: Cluster, url: str, load: OpenLoad, service: Service, options: argparse.Namespace) -> Day:
    """Runs the chosen parts, with steps of the day between them, and then steps until the time is over."""
    until_s = time.monotonic() + options.minutes * 60
    day = Day(load, options.out)
    losses = Losses(cluster, service, SYSTEM).steps() if isinstance(cluster, NodeCluster) else []
    once = [*service.long_steps(), *losses]
    steps = itertools.cycle(once)
    parts: dict[str, Callable[[], tuple[dict[str, Any], int]]] = {
        "images": lambda: model_images(cluster, url),
        "caches": lambda: model_caches(cluster, url),
        "zero": lambda: zero_cycles(cluster, url, options.cycles, options.cycle_requests),
        "autoscalers": lambda: autoscalers(cluster, options.address, options.autoscalers_minutes * 60),
        "noise": lambda: noise(cluster, url, options.noise_minutes * 60),
        "canaries": lambda: canaries(cluster, url, options),
    }
    chosen = words(options.parts)
    taken = 0
    for name, part in parts.items():
        if name in chosen:
            day.part(name, part)
            if "day" in chosen:
                for step in itertools.islice(steps, STEPS_BETWEEN_PARTS):
                    day.step(step)
                    taken += 1
    while "day" in chosen and (taken < len(once) or time.monotonic() < until_s):
        day.step(next(steps))
        taken += 1
        if taken % len(once) == 0:
            day.step(service.lose_a_gateway, breaks_requests=True)
    return day


def main() -> int:
    """Makes the cluster, runs the day, and removes the cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="steps go on so long (default: 60)")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAMES", help="by commas (default: all)")
    parser.add_argument("--load", type=float, default=7.0, metavar="N", help="requests a second (default: 7)")
    parser.add_argument(
        "--start-seconds", type=float, default=5.0, metavar="S", help="that its engines take to start (default: 5)"
    )
    parser.add_argument("--cycles", type=int, default=10, metavar="N", help="of zero (default: 10)")
    parser.add_argument("--cycle-requests", type=int, default=200, metavar="N", help="of each cycle (default: 200)")
    parser.add_argument("--autoscalers-minutes", type=float, default=10.0, metavar="N")
    parser.add_argument("--noise-minutes", type=float, default=10.0, metavar="N")
    parser.add_argument("--address", default="10.77.0.254", help="of this machine, as the node sees it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, written again after every part")
    add_flags(parser)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is removed
    with tempfile.TemporaryDirectory(prefix="mini-infer-day-") as folder:
        cluster = NodeCluster(os.environ["E2E_NODE"], Path(folder) / "node")
        try:
            for target in NAMES:
                cluster.load(build_image(target, Path(folder)))
            release = Release(cluster)
            release.install(**RELEASE_VALUES)
            service = Service(cluster, SYSTEM, "default", options.start_seconds)
            service.apply()
            service.ready(240)
            release.wait()
            with contextlib.ExitStack() as stack:
                url = stack.enter_context(cluster.reach(SYSTEM, f"{RELEASE}-gateway"))
                load = stack.enter_context(OpenLoad(url, NAME, options.load))
                day = run_day(cluster, url, load, service, options)
            day.save()
            if day.code():
                cluster.explain(SYSTEM, "default")
        except Exception:
            cluster.explain(SYSTEM, "default")
            raise
        finally:
            cluster.down()
    log_line(f"{day.result['load']}; {day.result['broken_with_a_gateway']} of them with a killed gateway")
    log_line(f"wrong: {', '.join(day.result['wrong']) or 'nothing'}")
    return day.code()


if __name__ == "__main__":
    sys.exit(main())
