"""What somebody else changed in an object's spec, or added to a Deployment's, beside what the operator applied. Pure.

Server-side apply puts back the fields that it sets, and says nothing of others: a variable, a sidecar or `paused: true`
would stay for ever. `metadata.managedFields` says who set what.
https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_infer_operator.objects.observed_objects import contains

Object = Mapping[str, Any]

LEFT_ALONE = ("spec.template.metadata.",)
"""Annotations and labels of pods: GitOps tools, injectors and `kubectl rollout restart` speak through them."""


SOMEBODY = "somebody"
"""The manager of a field that was removed: Kubernetes keeps no record of who did."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One field that somebody set, changed or removed."""

    manager: str
    path: str
    """Such as spec.template.spec.containers[engine].env[FOO]."""


def additions(live: Object, manifest: Object, ignored: Iterable[str] = ()) -> list[Drift]:
    """Fields of `live` that others than the operator set and `manifest` does not have; `live` is trimmed (trim.py).

    Managers in `ignored` may add what they like. What a webhook added to the operator's own request counts as its own.
    """
    skipped = frozenset(ignored)
    found = [
        Drift(entry["manager"], path)
        for entry in live["metadata"].get("managedFields", ())
        if entry["manager"] not in skipped
        for path in _added(entry["fieldsV1"]["f:spec"], manifest["spec"], "spec")
        if not path.startswith(LEFT_ALONE)
    ]
    return sorted(set(found), key=lambda drift: (drift.path, drift.manager))


def changes(live: Object, manifest: Object) -> list[Drift]:
    """Fields of `manifest` that others set to another value in `live`, or removed from its pods; `live` is trimmed.

    A field that the operator still owns differs because the operator decided so, and is no drift. Nobody owns a field
    that was removed, and what a revision's pods are made from never changes: there a missing field is drift.
    """
    own = live["metadata"].get("ownFields", ())
    found = [
        Drift(entry["manager"], path)
        for entry in live["metadata"].get("managedFields", ())
        for path in _changed(entry["fieldsV1"]["f:spec"], own, live["spec"], manifest["spec"], "spec")
    ]
    if "template" in manifest["spec"]:
        stored, made = (spec["template"]["spec"] for spec in (live["spec"], manifest["spec"]))
        found += [Drift(SOMEBODY, path) for path in _missing(stored, made, "spec.template.spec")]
    return sorted(set(found), key=lambda drift: (drift.path, drift.manager))


def _changed(fields: Object, own: Sequence[Object], live: Any, desired: Any, path: str) -> Iterator[str]:
    for key, below in fields.items():
        kind, _, name = key.partition(":")
        ours = [owned[key] for owned in own if key in owned]
        if kind == "f" and isinstance(live, Mapping) and isinstance(desired, Mapping) and name in desired:
            inner, now, wanted = f"{path}.{name}", live.get(name), desired[name]
        elif kind == "k":
            keys = json.loads(name)
            inner = f"{path}[{','.join(str(value) for value in keys.values())}]"
            now, wanted = _item(live, keys), _item(desired, keys)
        else:
            continue
        if set(below) - {"."}:
            yield from _changed(below, ours, now, wanted, inner)
        elif not ours and wanted is not None and not contains(now, wanted, quantities=_is_quantity(path)):
            yield inner


def _is_quantity(path: str) -> bool:
    return path.endswith((".requests", ".limits"))


def _missing(live: Any, desired: Any, path: str) -> Iterator[str]:
    """Fields and named items of `desired` that `live` lacks."""
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        for name, value in desired.items():
            if name in live:
                yield from _missing(live[name], value, f"{path}.{name}")
            elif not contains(None, value):
                yield f"{path}.{name}"
    elif isinstance(desired, Sequence) and not isinstance(desired, str):
        named = [item for item in desired if isinstance(item, Mapping) and "name" in item]
        for item in named:
            inner = f"{path}[{item['name']}]"
            now = _item(live, {"name": item["name"]})
            yield from [inner] if now is None else _missing(now, item, inner)


def _added(fields: Object, desired: Any, path: str) -> Iterator[str]:
    for key, below in fields.items():
        kind, _, name = key.partition(":")
        if kind == "f":
            if isinstance(desired, Mapping) and name in desired:
                yield from _added(below, desired[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
        elif kind == "k":
            keys = json.loads(name)
            item = _item(desired, keys)
            inner = f"{path}[{','.join(str(value) for value in keys.values())}]"
            if item is None:
                yield inner
            else:
                yield from _added(below, item, inner)
        elif kind == "v" and json.loads(name) not in (desired or ()):
            yield f"{path}[{name}]"


def _item(desired: Any, keys: Mapping[str, Any]) -> Any:
    """The item of a list with these keys; a key that the manifest leaves out has its default."""
    items = desired if isinstance(desired, Sequence) and not isinstance(desired, str) else ()
    return next((item for item in items if all(item.get(name, value) == value for name, value in keys.items())), None)
