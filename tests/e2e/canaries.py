"""Bad and good revisions on a cluster: the edits and the judgement of benchmarks/canary.py, with engines in pods.

A Job writes the demo model and its wrong copies to a claim, and a ConfigMap has the faults.
"""

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

import yaml

from benchmarks.canary import FAULTS, Edit, Place, Status, run, service, verdict
from benchmarks.canary_faults.models import BASE
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.soak import engine_image

NAMESPACE = "default"
CLAIM = "canary-models"
CONFIG = "canary-faults"
FOLDER = "/faults"
PLACE = Place(
    f"pvc://{CLAIM}",
    FOLDER,
    {
        "spec": {"volumes": [{"name": "faults", "configMap": {"name": CONFIG}}]},
        "container": {"volumeMounts": [{"name": "faults", "mountPath": FOLDER, "readOnly": True}]},
    },
)


class ClusterTarget:
    """A service of the cluster."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name

    async def status(self) -> Status:
        """Returns the service's status; empty while it is about an earlier spec."""
        (found,) = await asyncio.to_thread(self._cluster.read, "InferenceService", self._namespace, self._name)
        status: Status = found.get("status", {})
        return status if status.get("observedGeneration") == found["metadata"]["generation"] else {}

    async def write(self, document: Mapping[str, Any]) -> None:
        """Edits the service."""
        await asyncio.to_thread(self._cluster.apply, yaml.safe_dump(dict(document)))


def canaries(cluster: Cluster, url: str, options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Makes all edits beside clients of the gateway at `url`; returns what was found, and 0 if nothing failed."""
    make_models(cluster)
    document = service(PLACE, Edit(BASE, True), options.pause_s, options.least)
    cluster.apply(yaml.safe_dump(document))
    target = ClusterTarget(cluster, NAMESPACE, document["metadata"]["name"])
    apart = argparse.Namespace(**{**vars(options), "out": None})  # the file has all parts, and is written by the caller
    found = asyncio.run(run(target, url, PLACE, apart))
    cluster.kubectl("delete", "infsvc", document["metadata"]["name"], "-n", NAMESPACE)
    return found, verdict(found)


def make_models(cluster: Cluster) -> None:
    """Writes the models to a claim, and the faults to a ConfigMap."""
    cluster.make_claim(NAMESPACE, CLAIM)
    names = ("sitecustomize.py", "models.py")
    config = {"apiVersion": "v1", "kind": "ConfigMap", "data": {name: (FAULTS / name).read_text() for name in names}}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "spec": {
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [
                        {
                            "name": "models",
                            "image": engine_image(),
                            "command": ["python", f"{FOLDER}/models.py", "/models"],
                            "volumeMounts": [
                                {"name": "faults", "mountPath": FOLDER},
                                {"name": "models", "mountPath": "/models"},
                            ],
                        }
                    ],
                    "volumes": [
                        {"name": "faults", "configMap": {"name": CONFIG}},
                        {"name": "models", "persistentVolumeClaim": {"claimName": CLAIM}},
                    ],
                },
            },
        },
    }
    named = [
        {**manifest, "metadata": {"name": name, "namespace": NAMESPACE}}
        for name, manifest in ((CONFIG, config), (CLAIM, job))
    ]
    cluster.apply(yaml.safe_dump_all(named))

    def is_written() -> bool:
        (found,) = cluster.get("job", CLAIM, "-n", NAMESPACE)
        return bool(found.get("status", {}).get("succeeded"))

    wait_until("the models of the canaries", is_written, 180)
