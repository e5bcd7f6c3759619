"""What somebody else added to a Deployment's spec beside what the operator applied. Pure.

Server-side apply puts back the fields that it sets, and says nothing of others: a variable, a sidecar or `paused: true`
would stay for ever. `metadata.managedFields` says who set what.
https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]

LEFT_ALONE = ("spec.template.metadata.",)
"""Annotations and labels of pods: GitOps tools, injectors and `kubectl rollout restart` speak through them."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One field that should not be there."""

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
