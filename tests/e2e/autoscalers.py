"""Two HorizontalPodAutoscalers on the two roles of a service: demand that is noisy, and rises and falls.

Each autoscaler follows a metric of its role's pods, which a stand-in for the Prometheus adapter serves from here: the
role's demand, divided by its pods. First both demands stay where they are, with noise; then prefill's rises while
decode's falls, and both come back. Nobody but the autoscalers may write the numbers, and noise may not move them.
"""

import math
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from mini_infer_operator.resource import LABEL_ROLE
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.commands import log_line
from tests.e2e.watcher import Watcher
from tests.support.stub_metrics import GROUP, StubMetrics

NAMESPACE, NAME = "default", "scaled"
"""The stand-in knows this namespace."""
ROLES = ("prefill", "decode")
TARGET = 10.0
"""The demand that an autoscaler gives to one engine."""
NOISE = 0.3
"""Noise as a share of the demand, either way."""
WINDOW_S = 60
LEVELS: dict[str, tuple[float, float, float]] = {"prefill": (1.6, 3.0, 1.6), "decode": (3.0, 1.6, 3.0)}
"""The demand of each role in engines: in the first half of the time, the next quarter, and the last one."""


def demand(role: str, at_share: float, now_s: float) -> float:
    """Returns a role's demand at this share of the time. Noise has periods of 7, 23 and 61 s."""
    level = LEVELS[role][0 if at_share < 0.5 else 1 if at_share < 0.75 else 2]
    phase = ROLES.index(role) * 2.0
    noise = sum(math.sin(2 * math.pi * now_s / period_s + phase) for period_s in (7.0, 23.0, 61.0)) / 3
    return TARGET * level * (1 + NOISE * noise)


class ScalerWatcher(Watcher):
    """Notes each change of a scaler's number, and who made it, until stopped."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster
        self.changes: dict[str, list[tuple[float, int]]] = {role: [] for role in ROLES}
        self.writers: set[str] = set()
        self._begun_s = time.monotonic()

    def _look(self) -> None:
        for role in ROLES:
            (scaler,) = self._cluster.read("InferenceScaler", NAMESPACE, f"{NAME}-{role}")
            number, seen = scaler["spec"].get("replicas"), self.changes[role]
            if number is not None and (not seen or seen[-1][1] != number):
                seen.append((round(time.monotonic() - self._begun_s, 1), number))
                log_line(f"autoscalers: {role} {number}")
            self.writers |= {
                str(entry["manager"])
                for entry in scaler["metadata"].get("managedFields", ())
                if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
            }


def autoscalers(cluster: Cluster, address: str, duration_s: float) -> tuple[dict[str, Any], int]:
    """Runs both autoscalers for so long. Returns the changes, and 0 if there were no more than the demands ask for.

    `address` is one of this machine that the cluster's API server reaches.
    """
    cluster.apply(yaml.safe_dump_all([_service(), *(_scaler(role) for role in ROLES)]))
    wait_until("the scaled service", lambda: all(_ready(cluster, role) >= 1 for role in ROLES), 180)
    begun_s = time.monotonic()

    def values(metric: str, selector: str) -> dict[str, float]:
        pods = [pod["metadata"]["name"] for pod in cluster.read("Pod", NAMESPACE, labels=selector)]
        now_s = time.monotonic() - begun_s
        return {pod: demand(metric, now_s / duration_s, now_s) / len(pods) for pod in pods}

    with tempfile.TemporaryDirectory() as folder:
        stub = StubMetrics(Path(folder), list(ROLES), values, address)
        stub.start()
        try:
            cluster.apply(yaml.safe_dump_all([*stub.manifests(), *(_autoscaler(role) for role in ROLES)]))
            with ScalerWatcher(cluster) as watcher:
                time.sleep(duration_s)
            settled = {role: _ready(cluster, role) for role in ROLES}
        finally:
            cluster.kubectl("delete", "hpa", "-n", NAMESPACE, *(f"{NAME}-{role}" for role in ROLES))
            cluster.kubectl("delete", "apiservice", f"v1beta1.{GROUP}")
            stub.stop()
    cluster.kubectl("delete", "infsvc", NAME, "-n", NAMESPACE)
    cluster.kubectl("delete", "infscaler", "-n", NAMESPACE, *(f"{NAME}-{role}" for role in ROLES))
    turns = {role: turns_of([number for _, number in watcher.changes[role]]) for role in ROLES}
    found = {
        "changes": watcher.changes,
        "turns": turns,
        "writers": sorted(watcher.writers),
        "ready_at_the_end": settled,
        "number_at_the_end": {role: watcher.changes[role][-1][1] for role in ROLES},
    }
    in_peace = settled == found["number_at_the_end"] and max(turns.values()) <= len(LEVELS["prefill"]) - 1
    return found, 0 if in_peace else 1


def turns_of(numbers: list[int]) -> int:
    """Returns how often a row of numbers changes its direction."""
    steps = [after - before for before, after in pairwise(numbers)]
    return sum(1 for before, after in pairwise(steps) if before * after < 0)


def _ready(cluster: Cluster, role: str) -> int:
    labels = f"serving.mini-infer.io/service={NAME},{LABEL_ROLE}={role}"
    pods = cluster.read("Pod", NAMESPACE, labels=labels)
    is_true: Callable[[dict[str, Any]], bool] = lambda c: c["type"] == "Ready" and c["status"] == "True"  # noqa: E731
    return sum(any(map(is_true, pod["status"].get("conditions", ()))) for pod in pods)


def _service() -> dict[str, Any]:
    # A small node has room for them beside others.
    role = {"engine": {"extraArgs": ["--dry-run"]}, "resources": {"requests": {"cpu": "50m"}}}
    return {
        "apiVersion": "serving.mini-infer.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"model": {"uri": "demo", "name": NAME}, "prefill": role, "decode": role},
    }


def _scaler(role: str) -> dict[str, Any]:
    return {
        "apiVersion": "serving.mini-infer.io/v1alpha1",
        "kind": "InferenceScaler",
        "metadata": {"name": f"{NAME}-{role}", "namespace": NAMESPACE},
        "spec": {"service": NAME, "role": role},
    }


def _autoscaler(role: str) -> dict[str, Any]:
    target = {
        "apiVersion": "serving.mini-infer.io/v1alpha1",
        "kind": "InferenceScaler",
        "name": f"{NAME}-{role}",
    }
    pods = {"metric": {"name": role}, "target": {"type": "AverageValue", "averageValue": str(TARGET)}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": f"{NAME}-{role}", "namespace": NAMESPACE},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": 1,
            "maxReplicas": 4,
            "metrics": [{"type": "Pods", "pods": pods}],
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": WINDOW_S},
                "scaleDown": {"stabilizationWindowSeconds": WINDOW_S},
            },
        },
    }
