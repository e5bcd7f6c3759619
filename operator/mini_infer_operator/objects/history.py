"""Numbers a service's revisions, records the spec that began each, and decides which are kept. Pure.

A ControllerRevision never changes except for its number: the one that the spec asks for has the highest.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mini_infer_operator.objects.metadata import Manifest
from mini_infer_operator.resource import LABEL_REVISION, NO_PRESET

Object = Mapping[str, Any]

KEPT = 10
"""Revisions that are kept beside the current one, as many as a Deployment keeps."""


def with_history(
    manifests: Sequence[Manifest], live: Iterable[Object], current: str | None, spec: Mapping[str, Any]
) -> list[Manifest]:
    """Returns the manifests with each ControllerRevision's number, and with `spec` in those that are new.

    `live` are the existing ControllerRevisions; `current` is the revision that the spec asks for.
    """
    existing = {item["metadata"]["name"]: item for item in live}
    highest = max((int(item["revision"]) for item in existing.values()), default=0)
    result = []
    for manifest in manifests:
        if manifest["kind"] == "ControllerRevision":
            before = existing.get(manifest["metadata"]["name"])
            is_current = current is not None and manifest["metadata"]["name"].endswith(f"-{current}")
            number = int(before["revision"]) if before is not None else highest + 1
            if is_current and highest > number:
                number = highest + 1  # gone back to
            data = before["data"] if before is not None else {**manifest["data"], "spec": spec}
            manifest = {**manifest, "revision": number, "data": data}
        result.append(manifest)
    return result


def retained_revisions(live: Iterable[Object], owner_uid: str) -> set[str]:
    """Returns the names of the newest owned ControllerRevisions, which are kept although nothing runs from them.

    One that a deleted service left behind has no owner, and would be left behind again.
    """
    owned = [i for i in live if any(o.get("uid") == owner_uid for o in i["metadata"].get("ownerReferences", ()))]
    newest = sorted(owned, key=lambda item: int(item["revision"]), reverse=True)
    return {item["metadata"]["name"] for item in newest[: KEPT + 1]}


def spec_of(revision: Object) -> Mapping[str, Any] | None:
    """Returns the spec that began the revision; None for a revision of an older operator, which did not record it."""
    spec = revision["data"].get("spec")
    return dict(spec) if spec is not None else None


def pinned_spec(spec: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a kept revision's spec with the fields of `spec` that restart no engine: replicas, rollout, budget."""
    live = {name: spec[name] for name in ("rollout", "disruptionBudget", "operatorClass") if name in spec}
    pinned = {**{k: v for k, v in kept.items() if k not in {"rollout", "disruptionBudget", "operatorClass"}}, **live}
    for role in ("unified", "prefill", "decode"):
        if role in pinned and role in spec:
            counts = {name: spec[role][name] for name in ("replicas", "scaling") if name in spec[role]}
            pinned[role] = {**{k: v for k, v in pinned[role].items() if k not in {"replicas", "scaling"}}, **counts}
    return pinned


def running_spec(stored: Object, revisions: Sequence[Object]) -> dict[str, Any] | None:
    """Returns the spec of a service's last revision, with its preset's fields of that time, and with the fields of the
    stored one that restart no engine. None if none of its `revisions` has kept it.
    """
    revision = (stored.get("status") or {}).get("revision")
    for item in revisions:
        if item["metadata"].get("labels", {}).get(LABEL_REVISION) == revision and (kept := spec_of(item)) is not None:
            return {**pinned_spec(stored["spec"], kept), "preset": NO_PRESET}
    return None


def change_to(before: Any, after: Any) -> Any:
    """Returns the merge patch (RFC 7396) that turns `before` into `after`."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    removed: dict[str, Any] = {key: None for key in before if key not in after}
    changed = {k: change_to(before.get(k), v) for k, v in after.items() if k not in before or before[k] != v}
    return removed | changed


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Returns a line for each field that differs, such as `image: engine:1 -> engine:2`."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = sorted({*before, *after})
        return [
            line
            for name in names
            for line in differences(before.get(name), after.get(name), f"{path}.{name}" if path else name)
        ]
    return [] if before == after else [f"{path}: {_short(before)} -> {_short(after)}"]


def _short(value: Any) -> str:
    text = "(none)" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
