"""Reads the API server's objects: observed counts, frozen templates, and comparison with manifests. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from mini_infer_operator.objects.failures import failures_of
from mini_infer_operator.objects.observed_workloads import observed_workloads, pods_of
from mini_infer_operator.objects.ownership import revision_key
from mini_infer_operator.observe import Observed
from mini_infer_operator.resource import parse_quantity

Object = Mapping[str, Any]
_QUANTITY_MAPS = {"requests", "limits"}


def observed_of(
    workloads: Iterable[Object],
    pods: Sequence[Object],
    default_image: str,
    running: Mapping[str, int] | None = None,
    *,
    min_ready: timedelta,
    now: datetime,
) -> Observed:
    """Returns counts and times of workloads and pods, and the reasons why engines are not ready.

    `workloads` are Deployments and LeaderWorkerSets. `running` is the number of running requests by the name of the
    pod, for draining pods that reported it.
    """
    staying = [workload for workload in workloads if "deletionTimestamp" not in workload["metadata"]]
    seen = observed_workloads(staying, pods, running, min_ready=min_ready, now=now)
    return Observed(seen, failures_of(staying, pods), default_image)


def frozen_templates(workloads: Iterable[Object], revisions: Iterable[Object]) -> dict[tuple[str, str], Object]:
    """Returns each revision's pod templates (pod.py): as frozen, or as running if the ControllerRevision is gone."""
    templates: dict[tuple[str, str], Object] = {revision_key(workload): pods_of(workload) for workload in workloads}
    kept = {revision_key(r): {name: r["data"][name] for name in r["data"] if name != "spec"} for r in revisions}
    return templates | kept


def running_images(workloads: Iterable[Object]) -> dict[str, str]:
    """Returns the image of each existing revision."""
    staying = [workload for workload in workloads if "deletionTimestamp" not in workload["metadata"]]
    return {revision_key(w)[1]: pods_of(w)["template"]["spec"]["containers"][0]["image"] for w in staying}


def is_applied(live: Object, manifest: Object) -> bool:
    """Returns True if applying `manifest` would change nothing. Items of a list lack `kind` and `apiVersion`."""
    return contains(live, {key: value for key, value in manifest.items() if key not in {"kind", "apiVersion"}})


def contains(live: Any, desired: Any, *, quantities: bool = False) -> bool:
    """Returns True if writing `desired` would change nothing: `live` contains all of it, and may contain more.

    Lists must agree in length and order. In lists of named items only items named in `desired` are compared: drift.py
    finds added ones. Quantities are compared by value (the API server turns 0.25 into 250m), and an empty value equals
    an absent one.
    """
    if isinstance(desired, dict):  # as JSON has it; to ask for a Mapping takes a third of the time of all this
        if not isinstance(live, dict):
            return not desired
        return all(
            contains(live.get(key), value, quantities=quantities or key in _QUANTITY_MAPS)
            for key, value in desired.items()
        )
    if isinstance(desired, list | tuple):
        live = live or []
        if desired and all(isinstance(item, dict) and "name" in item for item in desired):
            by_name = {item.get("name"): item for item in live}
            return all(item["name"] in by_name and contains(by_name[item["name"]], item) for item in desired)
        return len(live) == len(desired) and all(map(contains, live, desired))
    if quantities and live is not None:
        return parse_quantity(live) == parse_quantity(desired)
    return bool(live == desired or (live is None and desired == ""))
