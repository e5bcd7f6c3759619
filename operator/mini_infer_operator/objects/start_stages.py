"""Divides the start of an engine's pod into stages, by the times in its status. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any

from mini_infer_operator.objects.observed_workloads import is_ready, time_of, worker_index

LATEST_STARTS = 5
"""Engines whose starts make the usual one: the latest."""
LONGEST_S = 86_400.0
"""Seconds from which a start is none: a clock was wrong, or somebody wrote the status."""


@dataclass(frozen=True, slots=True)
class StartStages:
    """The seconds of each stage, one after the other."""

    schedule_s: float
    """Time from the pod's creation until a node was found."""
    pull_s: float
    """Time until its first container ran: volumes were mounted, and images were there."""
    init_s: float
    """Time until its init containers had ended, such as the one that waits for a model's copy; 0 without any."""
    load_s: float
    """Time until the engine was ready: weights loaded, graphs captured."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole start."""
        return self.schedule_s + self.pull_s + self.init_s + self.load_s

    @property
    def by_name(self) -> dict[str, float]:
        """Seconds by the stage's name, for metrics."""
        stages = {"schedule": self.schedule_s, "pull": self.pull_s, "init": self.init_s, "load": self.load_s}
        return {**stages, "total": self.total_s}

    @property
    def message(self) -> str:
        """The stages as a phrase."""
        init = f"{self.init_s:.0f} s in init containers, " if self.init_s else ""
        return (
            f"{self.total_s:.0f} s: {self.schedule_s:.0f} s for a node, {self.pull_s:.0f} s for image and volumes, "
            f"{init}{self.load_s:.0f} s to load the model"
        )


def start_stages(pod: Mapping[str, Any]) -> StartStages | None:
    """Returns the stages of a pod's start.

    Returns None if the pod is not ready, is not the first of its engine, or a container was restarted: its times are
    then not those of a start.
    """
    status = pod.get("status") or {}
    main, init = status.get("containerStatuses") or (), status.get("initContainerStatuses") or ()
    if not is_ready(pod) or not main or worker_index(pod) != 0 or any(c.get("restartCount") for c in (*main, *init)):
        return None
    created = time_of(pod["metadata"].get("creationTimestamp"))
    scheduled, ready = (_since(status, kind) for kind in ("PodScheduled", "Ready"))
    started = _latest(_state(container, "running").get("startedAt") for container in main)
    ended = [_state(container, "terminated") for container in init if _state(container, "terminated")]
    first = min((t for c in ended if (t := time_of(c.get("startedAt"))) is not None), default=started)
    if created is None or scheduled is None or ready is None or started is None or first is None:
        return None
    moments = [created, scheduled, first, started, ready]
    total_s = (ready - created).total_seconds()
    if moments != sorted(moments) or total_s > LONGEST_S:
        return None
    return StartStages(*((after - before).total_seconds() for before, after in pairwise(moments)))


def usual_start_s(pods: Iterable[Mapping[str, Any]]) -> float | None:
    """Returns the median seconds of the latest starts, and at least 1; None if none is known."""
    starts = [(pod["metadata"]["creationTimestamp"], stages) for pod in pods if (stages := start_stages(pod))]
    latest = sorted(starts, key=lambda start: start[0])[-LATEST_STARTS:]
    return max(1.0, median(stages.total_s for _, stages in latest)) if latest else None


def _since(status: Mapping[str, Any], kind: str) -> datetime | None:
    conditions = status.get("conditions") or ()
    times = (c.get("lastTransitionTime") for c in conditions if c.get("type") == kind and c.get("status") == "True")
    return time_of(next(times, None))


def _state(container: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return (container.get("state") or {}).get(name) or {}


def _latest(times: Iterable[str | None]) -> datetime | None:
    moments = [time_of(text) for text in times]
    return None if None in moments else max((moment for moment in moments if moment is not None), default=None)
