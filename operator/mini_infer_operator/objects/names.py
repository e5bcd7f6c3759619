"""Names and labels of child objects: the same service always gets the same ones."""

from mini_infer_operator.resource import LABEL_REVISION, LABEL_ROLE, LABEL_SERVICE, InferenceService

MANAGED_BY = "app.kubernetes.io/managed-by"
_COMMON = {"app.kubernetes.io/name": "mini-infer", MANAGED_BY: "mini-infer-operator"}


def workload_name(service: str, role: str, revision: str) -> str:
    """Returns the name of a revision's Deployment or LeaderWorkerSet, and of its ControllerRevision."""
    return f"{service}-{role}-{revision}"


def engines_service_name(service: str) -> str:
    """Returns the name of the Service that reaches any engine of the service."""
    return f"{service}-engines"


def weights_service_name(service: str) -> str:
    """Returns the name of the headless Service by which engines find those that have their weights."""
    return f"{service}-weights"


def role_name(service: str, role: str) -> str:
    """Returns the name of an object that exists once for each role of a service."""
    return f"{service}-{role}"


def service_labels(service: InferenceService) -> dict[str, str]:
    """Returns the labels that every child of a service has."""
    return {**_COMMON, "app.kubernetes.io/instance": service.metadata.name, LABEL_SERVICE: service.metadata.name}


def selector(service: InferenceService, role: str, revision: str) -> dict[str, str]:
    """Returns the labels that select the pods of one revision."""
    return {LABEL_SERVICE: service.metadata.name, LABEL_ROLE: role, LABEL_REVISION: revision}
