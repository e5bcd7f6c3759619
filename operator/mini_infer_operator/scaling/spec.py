"""Reads `spec.<role>.scaling`: policies for the planner, and a spec with its numbers in place of `replicas`. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from mini_infer_operator.resource import InferenceService, Scaling, ScalingTargets, ScalingWindows
from mini_infer_operator.scaling.policy import ScalingPolicy, Targets, Windows

Roles = Mapping[str, int]


def policies_of(service: InferenceService) -> dict[str, ScalingPolicy]:
    """Returns the policy of each role whose number the planner sets."""
    return {
        name: policy_of(role.scaling)
        for name, role in service.roles.items()
        if role.scaling is not None and role.scaling.is_planned
    }


def policy_of(scaling: Scaling) -> ScalingPolicy:
    """Returns the policy, with defaults for what is left out."""
    least, most = _bounds(scaling.min_replicas, scaling.max_replicas)
    return ScalingPolicy(least, most, _targets(scaling.targets), _windows(scaling.windows))


def planned_spec(spec: Mapping[str, Any], status: Mapping[str, Any], decided: Roles) -> dict[str, Any]:
    """Returns a stored spec with the planner's numbers in place of the replicas of the roles that it scales.

    `decided` are its latest numbers; without one, that of the `status` counts, which an operator before this one may
    have written, and then the role's own replicas.
    """
    planned = dict(spec)
    before = {role.get("name"): role.get("wanted") for role in status.get("roles") or ()}
    for role, fields in spec.items():
        scaling = fields.get("scaling") if isinstance(fields, Mapping) else None
        if not isinstance(scaling, Mapping) or scaling.get("owner") == "Autoscaler":
            continue
        number = next(n for n in (decided.get(role), before.get(role), fields.get("replicas"), 1) if n is not None)
        least, most = scaling.get("minReplicas"), scaling.get("maxReplicas")
        if isinstance(number, int) and isinstance(most, int):  # else the checks of the spec say what is wrong
            least, most = _bounds(least if isinstance(least, int) else None, most)
            planned[role] = {**fields, "replicas": max(least, min(number, most))}
    return planned


def _bounds(least: int | None, most: int) -> tuple[int, int]:
    return (1 if least is None else least), most


def _targets(given: ScalingTargets | None) -> Targets:
    targets, given = Targets(), given or ScalingTargets()
    return Targets(
        targets.ttft_s if given.ttft_ms is None else given.ttft_ms / 1000,
        inf if given.itl_ms is None else given.itl_ms / 1000,
        targets.percentile if given.percentile is None else given.percentile / 100,
        inf if given.tokens_in_flight is None else given.tokens_in_flight,
    )


def _windows(given: ScalingWindows | None) -> Windows:
    windows, given = Windows(), given or ScalingWindows()
    return replace(
        windows,
        up_s=float(given.up_seconds or 0),
        down_s=None if given.down_seconds is None else float(given.down_seconds),
        zero_s=windows.zero_s if given.zero_seconds is None else float(given.zero_seconds),
    )
