"""Chooses the InferencePreset of a service: by its name, or by model family and GPU. Pure; reads unchecked objects."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer_operator.parse import InvalidServiceError
from mini_infer_operator.resource import NO_PRESET, ROLES, Reason, is_gpu

Object = Mapping[str, Any]


class PresetNotFoundError(InvalidServiceError):
    """Raised if `spec.preset` names an InferencePreset that does not exist, or that cannot be read."""

    reason = Reason.PRESET_NOT_FOUND


def chosen_preset(spec: Object, presets: Sequence[Object] | None) -> Object | None:
    """Returns the preset that applies to a service with this spec; None if none does.

    `presets` None: InferencePresets cannot be read. Raises PresetNotFoundError if the spec names one that is not there.
    """
    name = spec.get("preset")
    if name == NO_PRESET:
        return None
    if name is None:
        matching = [(rank, preset) for preset in presets or () if (rank := _rank(spec, preset)) is not None]
        return min(matching, key=lambda item: item[0])[1] if matching else None
    if presets is None:
        raise PresetNotFoundError(
            f"spec.preset: InferencePreset {name} cannot be read: the cluster does not serve the kind (kubectl apply "
            f"--server-side -f crds/), or the operator watches single namespaces; write preset: {NO_PRESET}"
        )
    for preset in presets:
        if preset["metadata"]["name"] == name:
            return preset
    raise PresetNotFoundError(
        f"spec.preset: there is no InferencePreset {name}: create it (kubectl get infpreset shows all there are), or "
        f"write preset: {NO_PRESET}"
    )


def model_base_name(uri: str) -> str:
    """Returns the model's name in lower case: the last part of the URI's path, without revision, tag and digest."""
    scheme, _, rest = uri.lower().rpartition("://")
    if scheme in {"oci", "hf"}:
        rest = re.split("[#@]", rest, maxsplit=1)[0]
    last = rest.rstrip("/").rpartition("/")[2]
    return last.partition(":")[0] if scheme == "oci" else last


def _rank(spec: Object, preset: Object) -> tuple[int, int, str] | None:
    """Returns the preset's rank among those that match, the least first; None if it does not match the service."""
    match = preset["spec"].get("match")
    roles = [role for name in ROLES if isinstance(role := spec.get(name), Mapping)]
    model = spec.get("model")
    uri = model.get("uri") if isinstance(model, Mapping) else None
    if match is None or not roles or not isinstance(uri, str):
        return None
    name, labels = model_base_name(uri), match.get("gpu") or {}
    lengths = [len(family) for family in match["families"] if _is_of(name, family)]
    fits = all(labels.items() <= _node_selector(role).items() if labels else not _asks_for_gpu(role) for role in roles)
    return (-max(lengths), -len(labels), preset["metadata"]["name"]) if lengths and fits else None


def _is_of(name: str, family: str) -> bool:
    return name.startswith(family) and name[len(family) :][:1] in {"", "-", "_"}


def _node_selector(role: Object) -> Object:
    return _inner(_inner(_inner(role, "template"), "spec"), "nodeSelector")


def _asks_for_gpu(role: Object) -> bool:
    resources = _inner(role, "resources")
    return bool(resources.get("claims")) or any(is_gpu(str(name)) for name in _inner(resources, "limits"))


def _inner(fields: Object, name: str) -> Object:
    inner = fields.get(name)
    return inner if isinstance(inner, Mapping) else {}
