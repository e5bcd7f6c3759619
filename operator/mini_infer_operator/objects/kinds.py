"""Lists the kinds of objects that the operator uses, one row each. Paths, watches, rights and order derive from it."""

from dataclasses import dataclass

from mini_infer_operator.resource import (
    GROUP,
    KIND,
    PLURAL,
    PRESET_KIND,
    PRESET_PLURAL,
    SCALER_KIND,
    SCALER_PLURAL,
    VERSION,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of Kubernetes objects."""

    name: str
    group: str
    """API group; "" is Kubernetes' core group."""
    version: str
    plural: str
    verbs: tuple[str, ...]
    """Verbs that the operator uses; a test checks that the chart's ClusterRole grants exactly these."""
    optional: bool = False
    """True if a cluster need not serve this kind; it then has no objects of it, which is no error."""
    child: bool = False
    """True if objects are created for a service: labelled, owned, watched, restored on change, deleted once not
    planned.
    """

    namespaced: bool = True
    """False if its objects are in no namespace; an operator that watches single namespaces has no rights on them."""

    @property
    def is_labelled(self) -> bool:
        """True if all relevant objects have the service's label: the operator creates them, directly or indirectly."""
        return self.group != GROUP

    @property
    def prefix(self) -> str:
        """The beginning of the kind's API paths."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    @property
    def api_version(self) -> str:
        """The `apiVersion` of the kind's manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version


_OWNED = ("get", "list", "watch", "create", "patch", "delete")
"""Verbs for kinds that the operator owns. A server-side apply that creates an object needs create and patch."""

KINDS: tuple[Kind, ...] = (
    Kind(KIND, GROUP, VERSION, PLURAL, ("get", "list", "watch")),
    Kind(SCALER_KIND, GROUP, VERSION, SCALER_PLURAL, ("get", "list", "watch", "patch"), optional=True),
    Kind(PRESET_KIND, GROUP, VERSION, PRESET_PLURAL, ("get", "list", "watch"), optional=True, namespaced=False),
    Kind("Service", "", "v1", "services", _OWNED, child=True),
    Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets", _OWNED, child=True),
    Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies", _OWNED, child=True),
    Kind("Job", "batch", "v1", "jobs", ("get", "list", "watch", "create", "delete"), child=True),  # never changed
    Kind("ControllerRevision", "apps", "v1", "controllerrevisions", _OWNED, child=True),
    Kind("Deployment", "apps", "v1", "deployments", _OWNED, child=True),
    Kind("LeaderWorkerSet", "leaderworkerset.x-k8s.io", "v1", "leaderworkersets", _OWNED, optional=True, child=True),
    Kind("Pod", "", "v1", "pods", ("list", "watch", "patch")),
    Kind("Event", "", "v1", "events", ("create",)),  # by kopf
    Kind("Secret", "", "v1", "secrets", ("create", "patch")),  # of peers; those of others are not read
)
"""All kinds. Children are written in this order and deleted in the reverse order."""
CHILD_KINDS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind.child)
BY_NAME: dict[str, Kind] = {kind.name: kind for kind in KINDS}


def path_of(kind: str, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
    """Returns the path of an object, or of a list; without a namespace, of the list over all namespaces."""
    row = BY_NAME[kind]
    parts = [row.prefix, *(("namespaces", namespace) if namespace else ()), row.plural]
    return "/".join([*parts, *(part for part in (name, subresource) if part)])
