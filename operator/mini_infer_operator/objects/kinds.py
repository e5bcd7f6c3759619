"""The kinds of objects that the operator reads and writes, one row each; paths, watches, rights and order follow."""

from dataclasses import dataclass

from mini_infer_operator.resource import GROUP, KIND, PLURAL, SCALER_KIND, SCALER_PLURAL, VERSION


@dataclass(frozen=True, slots=True)
class Kind:
    """One row."""

    name: str
    group: str
    """"" is Kubernetes' core group."""
    version: str
    plural: str
    verbs: tuple[str, ...]
    """What the operator may do; the chart's ClusterRole equals this by test."""
    optional: bool = False
    """Whether a cluster may be without it: then there are none of it, and nothing is wrong."""
    child: bool = False
    """Made for a service: labelled, owned, watched, put back when it changes, deleted when it is over."""

    @property
    def is_labelled(self) -> bool:
        """Whether those that matter have the service's label: all that the operator makes, or makes others make."""
        return self.group != GROUP

    @property
    def prefix(self) -> str:
        """Of its paths."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    @property
    def api_version(self) -> str:
        """As manifests write it."""
        return f"{self.group}/{self.version}" if self.group else self.version


_OWNED = ("get", "list", "watch", "create", "patch", "delete")
"""A server-side apply that creates needs create and patch."""

KINDS: tuple[Kind, ...] = (
    Kind(KIND, GROUP, VERSION, PLURAL, ("get", "list", "watch")),
    Kind(SCALER_KIND, GROUP, VERSION, SCALER_PLURAL, ("get", "list", "watch", "patch"), optional=True),
    Kind("Service", "", "v1", "services", _OWNED, child=True),
    Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets", _OWNED, child=True),
    Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies", _OWNED, child=True),
    Kind("ControllerRevision", "apps", "v1", "controllerrevisions", _OWNED, child=True),
    Kind("Deployment", "apps", "v1", "deployments", _OWNED, child=True),
    Kind("LeaderWorkerSet", "leaderworkerset.x-k8s.io", "v1", "leaderworkersets", _OWNED, optional=True, child=True),
    Kind("Pod", "", "v1", "pods", ("list", "watch", "patch")),
    Kind("Event", "", "v1", "events", ("create",)),  # by kopf
    Kind("Secret", "", "v1", "secrets", ("create", "patch")),  # of peers; those of others are not read
)
"""In the order in which children are written; they are deleted in the reverse order."""
CHILD_KINDS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind.child)
BY_NAME: dict[str, Kind] = {kind.name: kind for kind in KINDS}


def path_of(kind: str, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
    """The path of an object, or of a list; without a namespace: of the list over all namespaces."""
    row = BY_NAME[kind]
    parts = [row.prefix, *(("namespaces", namespace) if namespace else ()), row.plural]
    return "/".join([*parts, *(part for part in (name, subresource) if part)])
