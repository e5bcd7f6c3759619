"""The Service through which any engine of an InferenceService is reached without a gateway."""

from mini_infer_contract.launch import HTTP_PORT
from mini_infer_contract.resources import LABEL_SERVICE, InferenceService
from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.names import engines_service_name


def engines_service(service: InferenceService) -> Manifest:
    """Over all roles and revisions."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(service, engines_service_name(service.metadata.name), {}),
        "spec": {
            "selector": {LABEL_SERVICE: service.metadata.name},
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
