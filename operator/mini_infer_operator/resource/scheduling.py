"""Kubernetes' types that say on which nodes a pod may run: tolerations, affinity, spread. As in core/v1."""

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
    """How long a pod stays on a node that gets a NoExecute taint; for ever if left out."""


class NodeSelectorRequirement(KubernetesType):
    """A condition on one label or field of a node."""

    key: str = Field(min_length=1, max_length=317)
    """The label's key."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """How the label's value relates to values."""
    values: Texts | None = None
    """For In and NotIn any number, for Gt and Lt one integer."""


class NodeSelectorTerm(KubernetesType):
    """Conditions on a node that must all hold."""

    match_expressions: list[NodeSelectorRequirement] | None = Field(default=None, max_length=32)
    """Conditions on labels."""
    match_fields: list[NodeSelectorRequirement] | None = Field(default=None, max_length=32)
    """Conditions on fields, of which there is metadata.name."""


class NodeSelector(KubernetesType):
    """Terms of which one must hold."""

    node_selector_terms: list[NodeSelectorTerm] = Field(min_length=1, max_length=32)
    """Each with conditions that must all hold."""


class PreferredSchedulingTerm(KubernetesType):
    """Nodes that are preferred."""

    weight: int = Field(ge=1, le=100)
    """Against other preferences, 1 to 100."""
    preference: NodeSelectorTerm
    """Which nodes."""


class NodeAffinity(KubernetesType):
    """Which nodes the pods may or should run on."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """Only on these nodes."""
    preferred_during_scheduling_ignored_during_execution: list[PreferredSchedulingTerm] | None = Field(
        default=None, max_length=32
    )
    """Rather on these nodes."""


class PodAffinityTerm(KubernetesType):
    """Pods to be near to or far from."""

    topology_key: str = Field(min_length=1, max_length=317)
    """The node label that says what near is, such as kubernetes.io/hostname."""
    label_selector: OpenObject | None = None
    """Which pods, by matchLabels and matchExpressions."""
    namespaces: Texts | None = None
    """In which namespaces; the service's own if left out."""
    namespace_selector: OpenObject | None = None
    """Further namespaces, by matchLabels and matchExpressions."""
    match_label_keys: Texts | None = None
    """Labels whose values must equal the pod's own."""
    mismatch_label_keys: Texts | None = None
    """Labels whose values must differ from the pod's own."""


class WeightedPodAffinityTerm(KubernetesType):
    """Pods that it is preferred to be near to or far from."""

    weight: int = Field(ge=1, le=100)
    """Against other preferences, 1 to 100."""
    pod_affinity_term: PodAffinityTerm
    """Which pods, and what near is."""


class PodAffinity(KubernetesType):
    """Which pods these pods must or should be near to (affinity) or far from (anti-affinity)."""

    required_during_scheduling_ignored_during_execution: list[PodAffinityTerm] | None = Field(
        default=None, max_length=32
    )
    """Only so."""
    preferred_during_scheduling_ignored_during_execution: list[WeightedPodAffinityTerm] | None = Field(
        default=None, max_length=32
    )
    """Rather so."""


class Affinity(KubernetesType):
    """Where the pods may or should run, by nodes and by other pods."""

    node_affinity: NodeAffinity | None = None
    """By labels of nodes."""
    pod_affinity: PodAffinity | None = None
    """Near to other pods."""
    pod_anti_affinity: PodAffinity | None = None
    """Far from other pods."""


class TopologySpreadConstraint(KubernetesType):
    """How evenly the pods are spread over nodes or zones."""

    max_skew: int = Field(ge=1)
    """By how many pods two domains may differ."""
    topology_key: str = Field(min_length=1, max_length=317)
    """The node label whose values are the domains, such as topology.kubernetes.io/zone."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """What the scheduler does where the spread cannot be kept."""
    label_selector: OpenObject | None = None
    """Which pods are counted, by matchLabels and matchExpressions."""
    min_domains: int | None = Field(default=None, ge=1)
    """At least so many domains must exist."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes that affinity excludes are counted."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes with taints that are not tolerated are counted."""
    match_label_keys: Texts | None = None
    """Labels whose values must equal the pod's own to be counted."""
