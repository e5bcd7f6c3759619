"""Resolves a service and its preset into the checked service that engines are planned from. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mini_infer_operator.parse import InvalidServiceError, parse_service
from mini_infer_operator.presets.choose import PresetNotFoundError, chosen_preset
from mini_infer_operator.presets.merge import merged
from mini_infer_operator.resource import NO_PRESET, InferenceService, PresetStatus

Object = Mapping[str, Any]

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked service with its preset's fields, and where these come from."""

    service: InferenceService
    preset: PresetStatus | None
    lost: PresetNotFoundError | None = None
    """The reason why the fields are those of the service's last revision; None if they are those of now."""


def resolve_service(document: Object, presets: Sequence[Object] | None = ()) -> Resolved:
    """Parses a service with the fields of the preset that applies to it. `presets` None: they cannot be read.

    Where one applies, the result's own `spec.preset` is `none`: it stands alone, and so does the revision made from it.
    Raises InvalidServiceError with every fault found; PresetNotFoundError if the preset that it names is missing.
    """
    spec = document.get("spec")
    chosen = chosen_preset(spec, presets) if isinstance(spec, Mapping) else None
    if chosen is None or not isinstance(spec, Mapping):
        return Resolved(parse_service(document), None)
    result, metadata = merged(spec, chosen["spec"]), chosen["metadata"]
    try:
        service = parse_service({**document, "spec": {**result.spec, "preset": NO_PRESET}})
    except InvalidServiceError as error:
        parse_service(document)  # raises if the service's own fields are at fault
        raise InvalidServiceError(f"with the fields of InferencePreset {metadata['name']}: {error}") from error
    status = PresetStatus(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        chosen_by="Match" if spec.get("preset") is None else "Name",
        fields=sorted(result.fields),
    )
    return Resolved(service, status)


def resolve_or_keep(
    document: Object, presets: Sequence[Object] | None, running_spec: Callable[[], Object | None]
) -> Resolved:
    """Resolves a service as `resolve_service` does. Where the preset that it names is missing, `running_spec` gives the
    spec of its last revision, by which what runs goes on and is still scaled; None if that is not known.
    """
    try:
        return resolve_service(document, presets)
    except PresetNotFoundError as error:
        if (running := running_spec()) is None:
            raise
        return replace(resolve_service({**document, "spec": running}), lost=error)


def preset_in_force(resolved: Resolved, previous: Object) -> PresetStatus | None:
    """Returns the preset for the status. A paused service, and one whose preset is lost, keep the one that their
    revision was made with.
    """
    rollout, before = resolved.service.spec.rollout, previous.get("preset")
    is_kept = resolved.lost is not None or (rollout is not None and rollout.paused)
    if resolved.preset is not None or before is None or not is_kept:
        return resolved.preset
    return PresetStatus.model_validate(before)


def is_outdated(stored: Object, presets: Sequence[Object] | None) -> bool:
    """Returns True if another preset, or another generation of it, applies to a service than its status says."""
    status = (stored.get("status") or {}).get("preset") or {}
    try:
        chosen = chosen_preset(stored["spec"], presets)
    except PresetNotFoundError:
        return True
    metadata = chosen["metadata"] if chosen is not None else {}
    return any(metadata.get(field) != status.get(field) for field in ("name", "uid", "generation"))


def preset_event(previous: Object, preset: PresetStatus | None) -> tuple[str, str] | None:
    """Returns reason and message of an Event if another preset, or another generation of it, applies, else None."""
    before = previous.get("preset") or {}
    if preset is None:
        if not before:
            return None
        return "PresetRemoved", f"no InferencePreset applies any more; {before.get('name')} did"
    if (before.get("name"), before.get("uid", ""), before.get("generation")) == (
        preset.name,
        preset.uid,
        preset.generation,
    ):
        return None
    return "PresetApplied", f"InferencePreset {preset.name}, generation {preset.generation}, sets {named(preset)}"


def named(preset: PresetStatus) -> str:
    """Returns the fields that a preset sets as a list for people, cut to a few."""
    more = len(preset.fields) - _MOST_NAMED
    return (", ".join(preset.fields[:_MOST_NAMED]) or "no field") + (f" and {more} more" if more > 0 else "")
