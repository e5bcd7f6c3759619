"""Cycles of zero on a cluster: those of benchmarks/zero_cycles.py, with an engine in a pod."""

import asyncio
import time
from typing import Any

import yaml

from benchmarks.zero_cycles import NAME, SERVICE, run
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.soak import is_leaving, is_ready
from tests.e2e.watcher import Watcher

NAMESPACE = "default"
WHILE_IT_GOES = 3
"""Cycles whose requests come before the last engine has gone."""


class Starts(Watcher):
    """Notes when each engine's pod was made, its container started, and it was ready, until stopped."""

    every_s = 0.1

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._seen: dict[str, dict[str, float]] = {}

    def _look(self) -> None:
        for pod in pods_of(self._cluster):
            seen = self._seen.setdefault(pod["metadata"]["uid"], {})
            states = [status["state"] for status in pod["status"].get("containerStatuses", ())]
            reached = {
                "made": True,
                "runs": any("running" in state for state in states),
                "ready": is_ready(pod),
            }
            for stage in (stage for stage, is_there in reached.items() if is_there):
                seen.setdefault(stage, time.monotonic())

    def after(self, begun_s: float) -> dict[str, float]:
        """Returns the seconds from then to each stage of the next engine's start."""
        starts = sorted((seen for seen in self._seen.values() if seen["made"] > begun_s), key=lambda seen: seen["made"])
        return {stage: round(at_s - begun_s, 2) for stage, at_s in starts[0].items()} if starts else {}


def pods_of(cluster: Cluster) -> list[dict[str, Any]]:
    """Returns the pods of the service, those that end too."""
    return cluster.read("Pod", NAMESPACE, labels=f"serving.mini-infer.io/service={NAME}")


def zero_cycles(cluster: Cluster, url: str, cycles: int, requests: int) -> tuple[dict[str, Any], int]:
    """Runs so many cycles with so many requests each; returns what was found, and 0 if no request failed."""

    async def count() -> int:
        return len(await asyncio.to_thread(pods_of, cluster))

    async def count_staying() -> int:
        return sum(not is_leaving(pod) for pod in await asyncio.to_thread(pods_of, cluster))

    cluster.apply(yaml.safe_dump(SERVICE))
    wait_until("the first engine", lambda: any(map(is_ready, pods_of(cluster))), 180)
    with Starts(cluster) as starts:
        found = asyncio.run(run(url, count, cycles, requests))
    found["stages"] = [starts.after(begun_s) for begun_s in found.pop("begun_s")]
    # Here requests come as soon as the last engine is to go: it answers them, or another one does.
    found["while_it_goes"] = asyncio.run(run(url, count_staying, WHILE_IT_GOES, requests))
    cluster.kubectl("delete", "infsvc", NAME, "-n", NAMESPACE)
    outcomes = {*found["outcomes"], *found["while_it_goes"]["outcomes"]}
    return found, 0 if outcomes == {"ok"} else 1
