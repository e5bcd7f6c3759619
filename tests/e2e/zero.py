"""Cycles of zero on a cluster: those of benchmarks/zero_cycles.py, with an engine in a pod."""

import asyncio
from typing import Any

import yaml

from benchmarks.zero_cycles import NAME, SERVICE, run
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.soak import is_leaving, is_ready

NAMESPACE = "default"
WHILE_IT_GOES = 3
"""Cycles whose requests come before the last engine has gone."""


def zero_cycles(cluster: Cluster, url: str, cycles: int, requests: int) -> tuple[dict[str, Any], int]:
    """Runs so many cycles with so many requests each; returns what was found, and 0 if no request failed."""

    def pods() -> list[dict[str, Any]]:
        return cluster.read("Pod", NAMESPACE, labels=f"serving.mini-infer.io/service={NAME}")

    async def count() -> int:
        return len(await asyncio.to_thread(pods))

    async def count_staying() -> int:
        return sum(not is_leaving(pod) for pod in await asyncio.to_thread(pods))

    cluster.apply(yaml.safe_dump(SERVICE))
    wait_until("the first engine", lambda: any(map(is_ready, pods())), 180)
    found = asyncio.run(run(url, count, cycles, requests))
    # Here requests come as soon as the last engine is to go: it answers them, or another one does.
    found["while_it_goes"] = asyncio.run(run(url, count_staying, WHILE_IT_GOES, requests))
    cluster.kubectl("delete", "infsvc", NAME, "-n", NAMESPACE)
    outcomes = {*found["outcomes"], *found["while_it_goes"]["outcomes"]}
    return found, 0 if outcomes == {"ok"} else 1
