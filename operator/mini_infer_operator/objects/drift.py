"""Finds fields that others changed in an object's spec, or added to a Deployment's, since the operator's apply. Pure.

Server-side apply restores the fields that it sets and ignores others: a variable, a sidecar or `paused: true` would
stay for ever. `metadata.managedFields` says who set what.
https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_infer_operator.objects.observed_objects import contains

Object = Mapping[str, Any]

LEFT_ALONE = ("spec.template.metadata.",)
"""Path prefixes that are no drift: GitOps tools, injectors and `kubectl rollout restart` set pods' annotations and
labels.
"""


SOMEBODY = "somebody"
"""Manager of a field that was removed: Kubernetes does not record who removed it."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One field that another manager set, changed or removed."""

    manager: str
    path: str
    """Path of the field, such as spec.template.spec.containers[engine].env[FOO]."""


def additions(live: Object, manifest: Object, ignored: Iterable[str] = ()) -> list[Drift]:
    """Returns fields of the trimmed `live` (trim.py) that others set and that `manifest` does not have.

    Managers in `ignored` may add any field. Fields that a webhook added to the operator's own request count as its own.
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
    """Returns fields of `manifest` that others changed in the trimmed `live`, or removed from its pods.

    A field that the operator still owns differs because the operator decided so, and is no drift. A removed field has
    no owner; since a revision's pod template never changes, a field missing there is drift.
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
            inner, now, expected = f"{path}.{name}", live.get(name), desired[name]
        elif kind == "k":
            keys = json.loads(name)
            inner = f"{path}[{','.join(str(value) for value in keys.values())}]"
            now, expected = _item(live, keys), _item(desired, keys)
        else:
            continue
        if set(below) - {"."}:
            yield from _changed(below, ours, now, expected, inner)
        elif not ours and expected is not None and not contains(now, expected, quantities=_is_quantity(path)):
            yield inner


def _is_quantity(path: str) -> bool:
    return path.endswith((".requests", ".limits"))


def _missing(live: Any, desired: Any, path: str) -> Iterator[str]:
    """Yields fields and named items of `desired` that `live` lacks."""
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
    """Returns the item of a list with these keys; a key that the manifest leaves out has its default."""
    items = desired if isinstance(desired, Sequence) and not isinstance(desired, str) else ()
    return next((item for item in items if all(item.get(name, value) == value for name, value in keys.items())), None)
