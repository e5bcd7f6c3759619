"""Kubernetes objects as an API server with other versions, other controllers and rude users would send them.

They are read in this process: what is wanted is the declared error, or a result.
"""

from random import Random
from typing import Any

import msgspec

from mini_infer_gateway.endpoints.pods import seen_pod
from mini_infer_operator.parse import InvalidServiceError, parse_service
from tests.fuzz.fleet import Fleet
from tests.fuzz.hostile.load import Findings
from tests.fuzz.mutation import mutated
from tests.support.services import VALID

POD: dict[str, Any] = {
    "metadata": {
        "name": "a",
        "namespace": "b",
        "labels": {"serving.mini-infer.io/service": "demo", "serving.mini-infer.io/role": "unified"},
        "annotations": {"serving.mini-infer.io/model": "demo"},
    },
    "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 8000}]}]},
    "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
}
SERVICE: dict[str, Any] = {
    **VALID,
    "spec": {
        "model": {"uri": "demo"},
        "unified": {
            "replicas": 2,
            "resources": {"limits": {"cpu": "2", "memory": "1Gi"}},
            "template": {"spec": {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "x", "operator": "Exists"}]}},
        },
    },
}


async def attack(fleet: Fleet, random: Random, found: Findings) -> None:
    """Reads mutated pods and services, some at a time."""
    while True:
        for _ in range(20):
            pod, service = mutated(random, POD), mutated(random, SERVICE)
            try:
                seen_pod(pod)
                found.count("objects", "pod read")
            except msgspec.ValidationError:
                found.count("objects", "pod refused")
            except Exception as error:
                found.note(f"objects: {type(error).__name__}: {error} for the pod {str(pod)[:600]}")
            try:
                parse_service(service)
                found.count("objects", "service read")
            except InvalidServiceError:
                found.count("objects", "service refused")
            except Exception as error:
                found.note(f"objects: {type(error).__name__}: {error} for the service {str(service)[:600]}")
        await fleet.pause(random, 1.0)
