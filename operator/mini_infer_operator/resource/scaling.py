"""Defines `spec.<role>.scaling`: how many engines of a role the operator may run, and by which targets it decides."""

from typing import Literal

from pydantic import Field

from mini_infer_operator.resource.rules import ApiModel, Rule

MOST_REPLICAS = 1000


class ScalingTargets(ApiModel):
    """The latencies that requests shall keep, and the work that an engine shall have at most."""

    ttft_ms: int | None = Field(default=None, ge=1, le=86_400_000)
    """Milliseconds to the first token; 2000 if left out."""
    itl_ms: int | None = Field(default=None, ge=1, le=86_400_000)
    """Milliseconds between two tokens; no target if left out."""
    percentile: int | None = Field(default=None, ge=50, le=99)
    """Percentage of requests that shall keep both; 95 if left out."""
    tokens_in_flight: int | None = Field(default=None, ge=1, le=2**31)
    """Tokens of running requests, prompts and answers, for each engine; no target if left out."""


class ScalingWindows(ApiModel):
    """The seconds for which a need must last before the number of engines follows it."""

    up_seconds: int | None = Field(default=None, ge=0, le=3600)
    """Seconds for which more engines must be needed; 0 if left out."""
    down_seconds: int | None = Field(default=None, ge=0, le=86_400)
    """Seconds for which fewer must suffice; four measured starts, and at least 60, if left out."""
    zero_seconds: int | None = Field(default=None, ge=1, le=86_400)
    """Seconds without any request until the last engine is stopped, if minReplicas is 0; 300 if left out."""


class Scaling(ApiModel):
    """Bounds and targets by which the operator sets the number of engines."""

    rules = (
        Rule(
            "!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
            "scaling.minReplicas is above scaling.maxReplicas: lower one, or raise the other",
            lambda s: s.min_replicas is None or s.min_replicas <= s.max_replicas,
        ),
    )
    min_replicas: int | None = Field(default=None, ge=0, le=MOST_REPLICAS)
    """The fewest engines; 0 lets the last one stop while there are no requests. 1 if left out."""
    max_replicas: int = Field(ge=1, le=MOST_REPLICAS)
    """The most engines."""
    owner: Literal["Planner", "Autoscaler"] | None = None
    """The one that sets the number: the operator's planner, or an HPA or KEDA by the scale subresource, which the
    planner then leaves alone. Planner if left out.
    """
    targets: ScalingTargets | None = None
    """Latencies or tokens in flight that requests shall keep."""
    windows: ScalingWindows | None = None
    """Seconds that a need must last before engines are added or removed."""

    @property
    def is_planned(self) -> bool:
        """True if the planner sets the number."""
        return self.owner != "Autoscaler"
