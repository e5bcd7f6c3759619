"""Measures how long engines take to start, from the conditions of their pods. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

LATEST = 5
"""Engines that count: the latest to become ready."""
LONGEST_S = 86_400.0


@dataclass(frozen=True, slots=True)
class StartTime:
    """The start of one engine, in seconds since its pod was created."""

    scheduled_s: float
    """Until a node was found."""
    running_s: float
    """Until its image was there and its container ran."""
    ready_s: float
    """Until its model was loaded and it took requests."""

    @property
    def message(self) -> str:
        """The stages as a phrase."""
        pulled_s, loaded_s = self.running_s - self.scheduled_s, self.ready_s - self.running_s
        return f"{self.scheduled_s:.0f} s for a node, {pulled_s:.0f} s for the image, {loaded_s:.0f} s for the model"


def start_time(pod: Mapping[str, Any]) -> StartTime | None:
    """Returns the stages of a pod's start; None if it is not ready, or was restarted: then it says nothing of them."""
    status = pod.get("status") or {}
    conditions = {c.get("type"): c for c in status.get("conditions") or () if c.get("status") == "True"}
    containers = status.get("containerStatuses") or ()
    if "Ready" not in conditions or not containers or any(c.get("restartCount") for c in containers):
        return None
    try:
        created = _moment(pod["metadata"].get("creationTimestamp"))
        ready = _moment(conditions["Ready"].get("lastTransitionTime"))
        scheduled = _moment(conditions.get("PodScheduled", {}).get("lastTransitionTime"))
        running = max(_moment(((c.get("state") or {}).get("running") or {}).get("startedAt")) for c in containers)
    except (ValueError, TypeError):
        return None
    seconds = [(moment - created).total_seconds() for moment in (scheduled, running, ready)]
    return StartTime(*seconds) if seconds == sorted(seconds) and seconds[0] >= 0 and seconds[2] <= LONGEST_S else None


def usual_start_s(pods: Iterable[Mapping[str, Any]]) -> float | None:
    """Returns the median seconds of the latest starts; None if none is known."""
    starts = [(pod["metadata"].get("creationTimestamp") or "", start) for pod in pods if (start := start_time(pod))]
    latest = sorted(starts, key=lambda one: one[0])[-LATEST:]
    return max(1.0, median(start.ready_s for _, start in latest)) if latest else None


def _moment(text: Any) -> datetime:
    return datetime.fromisoformat(text)
