"""The headless Service whose name resolves to the engines that are ready, for engines that load their weights."""

from typing import Any

from mini_infer_contract.launch import WEIGHTS_PEERS_ENV, WEIGHTS_PORT, WEIGHTS_PORT_ENV
from mini_infer_operator.launch import Launch
from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.names import weights_service_name
from mini_infer_operator.resource import LABEL_SERVICE, InferenceService


def weights_service(service: InferenceService) -> Manifest:
    """Returns a headless Service over the engines of all roles and revisions: each answers for the tensors it has."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(service, weights_service_name(service.metadata.name), {}),
        "spec": {
            "clusterIP": "None",
            "ipFamilyPolicy": "PreferDualStack",
            "selector": {LABEL_SERVICE: service.metadata.name},
            "ports": [{"name": "weights", "port": WEIGHTS_PORT, "targetPort": WEIGHTS_PORT, "protocol": "TCP"}],
        },
    }


def weights_environment(service: InferenceService, launch: Launch) -> list[dict[str, Any]]:
    """Returns the variables by which an engine serves its weights and finds those of others.

    Engines over several nodes, and those with several engines in a server, read files.
    """
    if not exchanges_weights(launch):
        return []
    name = weights_service_name(service.metadata.name)
    return [
        {"name": WEIGHTS_PORT_ENV, "value": str(WEIGHTS_PORT)},
        {"name": WEIGHTS_PEERS_ENV, "value": f"{name}.{service.metadata.namespace}.svc:{WEIGHTS_PORT}"},
    ]


def exchanges_weights(launch: Launch) -> bool:
    """Returns True if engines of this launch can exchange weights."""
    return launch.nodes == 1 and (launch.parallelism.data or 1) == 1 and "--dry-run" not in launch.arguments
