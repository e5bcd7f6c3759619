"""An hour of noise: requests at an even rate, by chance, of lengths that vary. The planner may not flap.

Engines are real ones with the demo whose passes take longer (benchmarks/canary_faults), so that a few requests run at a
time and a small machine has time for them. How many run moves by chance around a mean that needs between one engine
and two; there is no reason to change the number again and again.
"""

import asyncio
import time
from collections import Counter
from random import Random
from typing import Any

import aiohttp
import yaml

from benchmarks.canary import FAULTS
from benchmarks.zero_cycles import streamed
from tests.e2e.autoscalers import turns_of
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.commands import log_line
from tests.e2e.soak import is_ready
from tests.e2e.watcher import Watcher

NAMESPACE, NAME = "default", "noisy"
FOLDER, CONFIG = "/faults", "noise-faults"
SLOW_MS = 40
RATE = 1.5
"""Requests a second."""
TARGETS = {"ttftMs": 2000, "itlMs": 300, "tokensInFlight": 1500}
MOST_TURNS = 2
"""Changes of direction in the time: one number is too few or too many at first, until noise has been seen."""
REQUEST_LIMIT_S = 120.0


class NumberWatcher(Watcher):
    """Notes each number of engines that the planner wants, until stopped."""

    every_s = 1.0

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster, self._begun_s = cluster, time.monotonic()
        self.changes: list[tuple[float, int]] = []

    def _look(self) -> None:
        (service,) = self._cluster.read("InferenceService", NAMESPACE, NAME)
        wanted = next((role.get("wanted") for role in service.get("status", {}).get("roles", ())), None)
        if wanted is not None and (not self.changes or self.changes[-1][1] != wanted):
            self.changes.append((round(time.monotonic() - self._begun_s, 1), wanted))
            log_line(f"noise: {wanted} engines")


def noise(cluster: Cluster, url: str, duration_s: float, seed: int = 6) -> tuple[dict[str, Any], int]:
    """Sends noise for so long; returns the numbers of engines, and 0 if they did not flap and no request failed."""
    cluster.apply(yaml.safe_dump_all(_manifests()))
    wait_until("the noisy service", lambda: any(map(is_ready, _pods(cluster))), 180)
    with NumberWatcher(cluster) as watcher:
        outcomes, firsts_s = asyncio.run(_load(url, duration_s, Random(seed)))
    numbers = [number for _, number in watcher.changes]
    ordered = sorted(firsts_s)
    found = {
        "changes": watcher.changes,
        "turns": turns_of(numbers),
        "outcomes": dict(outcomes),
        "first_token_p95_s": round(ordered[int(0.95 * (len(ordered) - 1))], 3) if ordered else None,
        "events": _events(cluster),
    }
    cluster.kubectl("delete", "infsvc", NAME, "-n", NAMESPACE)
    return found, 0 if found["turns"] <= MOST_TURNS and outcomes.keys() == {"ok"} else 1


async def _load(url: str, duration_s: float, dice: Random) -> tuple[Counter[str], list[float]]:
    outcomes, firsts_s = Counter[str](), list[float]()

    async def one(session: aiohttp.ClientSession, words: int, tokens: int) -> None:
        outcome, first_s = await _complete(session, url, words, tokens)
        outcomes[outcome] += 1
        if first_s:
            firsts_s.append(first_s)

    timeouts = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeouts) as session, asyncio.TaskGroup() as tasks:
        begun_s = due_s = time.monotonic()
        while due_s < begun_s + duration_s:
            words, tokens = _length(dice, 4.0, 200), _length(dice, 3.5, 200)
            tasks.create_task(one(session, words, tokens))
            due_s += dice.expovariate(RATE)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return outcomes, firsts_s


def _length(dice: Random, mean_of_log: float, most: int) -> int:
    return max(4, min(most, int(dice.lognormvariate(mean_of_log, 0.7))))


async def _complete(session: aiohttp.ClientSession, url: str, words: int, tokens: int) -> tuple[str, float]:
    """Returns the outcome of one stream, and the seconds to its first token."""
    prompt = " ".join(f"{time.monotonic_ns() + number:x}"[-3:] for number in range(words))
    body = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    return await streamed(session, f"{url}/v1/completions", body)


def _pods(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.read("Pod", NAMESPACE, labels=f"serving.mini-infer.io/service={NAME}")


def _events(cluster: Cluster) -> list[str]:
    """Returns the reasons that the planner gave."""
    found = cluster.get("events", "-n", NAMESPACE, "--field-selector", f"involvedObject.name={NAME},reason=Planned")
    return [str(event.get("message") or event.get("note")) for event in found]


def _manifests() -> list[dict[str, Any]]:
    """Returns the service, and the ConfigMap that makes its engines' passes slow."""
    fault = "sitecustomize.py"
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CONFIG, "namespace": NAMESPACE},
        "data": {fault: (FAULTS / fault).read_text()},
    }
    variables = {"PYTHONPATH": FOLDER, "CANARY_FAULT": f"slow:{SLOW_MS}"}
    template = {
        "spec": {"volumes": [{"name": "faults", "configMap": {"name": CONFIG}}]},
        "container": {
            "volumeMounts": [{"name": "faults", "mountPath": FOLDER, "readOnly": True}],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
        },
    }
    unified = {
        "engine": {"device": "cpu", "kvCacheMemory": "128Mi"},
        "template": template,
        "resources": {"requests": {"cpu": "50m"}},
        "scaling": {"minReplicas": 1, "maxReplicas": 6, "targets": TARGETS},
    }
    service = {
        "apiVersion": "serving.mini-infer.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"model": {"uri": "demo", "name": NAME}, "unified": unified},
    }
    return [config, service]
