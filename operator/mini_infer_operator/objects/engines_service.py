"""The Service through which any engine of an InferenceService is reached without a gateway."""

from mini_infer_contract.launch import HTTP_PORT
from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.names import engines_service_name
from mini_infer_operator.plan.plan import Plan
from mini_infer_operator.resource import ANSWERING_ROLES, LABEL_ROLE, LABEL_SERVICE, InferenceService


def engines_service(service: InferenceService, plan: Plan, *, is_fluid: bool = False) -> Manifest:
    """Returns a Service over all revisions of the role that answers requests.

    It covers all roles while an edit replaces that role by another, and if engines switch roles (`is_fluid`): any of
    them may be a decode engine now, and the others answer whole requests too. Workers of groups have no port of this
    name, so they get no requests.
    """
    answering = {w.role for w in plan.workloads} & set(ANSWERING_ROLES)
    role = {LABEL_ROLE: "decode"} if answering == {"decode"} and not is_fluid else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(service, engines_service_name(service.metadata.name), {}),
        "spec": {
            "ipFamilyPolicy": "PreferDualStack",
            "selector": {LABEL_SERVICE: service.metadata.name, **role},
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
