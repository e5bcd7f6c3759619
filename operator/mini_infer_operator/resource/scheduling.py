"""Types the choice of nodes for a pod: tolerations, affinity, spread. As in core/v1."""

from typing import Annotated, Literal

from pydantic import Field

from mini_infer_operator.resource.quantity import ShortText
from mini_infer_operator.resource.rules import KubernetesType, OpenObject, Rule

Texts = Annotated[list[ShortText], Field(max_length=64)]


class Toleration(KubernetesType):
    """A taint that the pods tolerate."""

    rules = (
        Rule(
            "has(self.operator) && self.operator == 'Exists' ? !has(self.value) || self.value == '' "
            ": has(self.key) && self.key != ''",
            "a toleration needs a key, and with operator Exists it has no value: write {key: nvidia.com/gpu, operator: "
            "Exists}, or {operator: Exists} for every taint",
            lambda t: not t.value if t.operator == "Exists" else bool(t.key),
        ),
    )
    key: str | None = Field(default=None, max_length=317)
    """The taint's key; with operator Exists it may be left out, which tolerates every taint."""
    operator: Literal["Exists", "Equal"] | None = None
    """Equal (if left out): key and value must be the taint's. Exists: the key alone."""
    value: str | None = Field(default=None, max_length=63)
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; every effect if left out."""
    toleration_seconds: int | None = None
    """Seconds that a pod stays on a node that gets a NoExecute taint; for ever if left out."""


class NodeSelectorRequirement(KubernetesType):
    """A condition on one label or field of a node."""

    key: str = Field(min_length=1, max_length=317)
    """The label's key."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """The relation between the label's value and values."""
    values: Texts | None = None
    """Any number of values for In and NotIn, one integer for Gt and Lt."""


class NodeSelectorTerm(KubernetesType):
    """Conditions on a node that must all hold."""

    match_expressions: list[NodeSelectorRequirement] | None = Field(default=None, max_length=32)
    """Conditions on labels."""
    match_fields: list[NodeSelectorRequirement] | None = Field(default=None, max_length=32)
    """Conditions on fields; the only field is metadata.name."""


class NodeSelector(KubernetesType):
    """Terms of which at least one must hold."""

    node_selector_terms: list[NodeSelectorTerm] = Field(min_length=1, max_length=32)
    """Terms, each with conditions that must all hold."""


class PreferredSchedulingTerm(KubernetesType):
    """A preference for some nodes."""

    weight: int = Field(ge=1, le=100)
    """The weight against other preferences, 1 to 100."""
    preference: NodeSelectorTerm
    """The preferred nodes."""


class NodeAffinity(KubernetesType):
    """The nodes on which the pods may or should run."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """The only nodes on which the pods may run."""
    preferred_during_scheduling_ignored_during_execution: list[PreferredSchedulingTerm] | None = Field(
        default=None, max_length=32
    )
    """The preferred nodes."""


class PodAffinityTerm(KubernetesType):
    """Other pods, to be near to or far from."""

    topology_key: str = Field(min_length=1, max_length=317)
    """The node label whose equal values mean near, such as kubernetes.io/hostname."""
    label_selector: OpenObject | None = None
    """Labels of the other pods, by matchLabels and matchExpressions."""
    namespaces: Texts | None = None
    """The namespaces of the other pods; the service's own if left out."""
    namespace_selector: OpenObject | None = None
    """Further namespaces, by matchLabels and matchExpressions."""
    match_label_keys: Texts | None = None
    """Labels whose values must equal the pod's own."""
    mismatch_label_keys: Texts | None = None
    """Labels whose values must differ from the pod's own."""


class WeightedPodAffinityTerm(KubernetesType):
    """A preference to be near to or far from other pods."""

    weight: int = Field(ge=1, le=100)
    """The weight against other preferences, 1 to 100."""
    pod_affinity_term: PodAffinityTerm
    """Pods to be near to or far from, and the meaning of near."""


class PodAffinity(KubernetesType):
    """Other pods that these pods must or should be near to (affinity) or far from (anti-affinity)."""

    required_during_scheduling_ignored_during_execution: list[PodAffinityTerm] | None = Field(
        default=None, max_length=32
    )
    """Terms that must all hold."""
    preferred_during_scheduling_ignored_during_execution: list[WeightedPodAffinityTerm] | None = Field(
        default=None, max_length=32
    )
    """Terms that are preferred."""


class Affinity(KubernetesType):
    """The nodes and the other pods that decide where the pods may or should run."""

    node_affinity: NodeAffinity | None = None
    """The nodes, by their labels."""
    pod_affinity: PodAffinity | None = None
    """Other pods to be near to."""
    pod_anti_affinity: PodAffinity | None = None
    """Other pods to be far from."""


class TopologySpreadConstraint(KubernetesType):
    """An even spread of the pods over nodes or zones."""

    max_skew: int = Field(ge=1)
    """The number of pods by which two domains may differ."""
    topology_key: str = Field(min_length=1, max_length=317)
    """The node label whose values are the domains, such as topology.kubernetes.io/zone."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """The scheduler's choice if the spread cannot be kept."""
    label_selector: OpenObject | None = None
    """The pods to count, by matchLabels and matchExpressions."""
    min_domains: int | None = Field(default=None, ge=1)
    """The number of domains that must exist."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Honor to leave out nodes that affinity excludes, Ignore to count them."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Honor to leave out nodes with taints that are not tolerated, Ignore to count them."""
    match_label_keys: Texts | None = None
    """Labels whose values must equal the pod's own to be counted."""
