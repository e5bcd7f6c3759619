"""Renders the LeaderWorkerSet that runs the engines of one role and revision if each spans several nodes.

A group is one engine: a leader, which answers requests, and a worker on each further node. The LeaderWorkerSet
controller (not ours) creates the pods, their environment and the headless Service by which workers find their leader,
and recreates the whole group when one pod restarts. The object is scaled, and never rolled in place.
https://lws.sigs.k8s.io/
"""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.objects.kinds import BY_NAME
from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.names import selector, workload_name
from mini_infer_operator.plan.plan import Workload
from mini_infer_operator.resource import InferenceService


def leader_worker_set(service: InferenceService, workload: Workload, frozen: Mapping[str, Any]) -> Manifest:
    """Returns the LeaderWorkerSet of one role and revision; `frozen` is the result of `pod.frozen_pods`."""
    labels = selector(service, workload.role, workload.revision)
    name = workload_name(service.metadata.name, workload.role, workload.revision)
    return {
        "apiVersion": BY_NAME["LeaderWorkerSet"].api_version,
        "kind": "LeaderWorkerSet",
        "metadata": child_metadata(service, name, labels),
        "spec": {
            "replicas": workload.replicas,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": frozen["size"],
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": frozen["template"],
                "workerTemplate": frozen["workerTemplate"],
            },
        },
    }
