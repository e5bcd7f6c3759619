from typing import Any

import pytest

from mini_infer_operator.cli.rollout_command import restored_spec
from mini_infer_operator.launch import service_revision
from mini_infer_operator.parse import InvalidServiceError, parse_service
from mini_infer_operator.presets.resolve import is_outdated, preset_event, preset_in_force, resolve_service
from mini_infer_operator.reconcile import reconcile
from mini_infer_operator.resource import PresetStatus
from tests.operator.test_reconcile import MemoryBackend, settle
from tests.support.services import VALID, VALID_PRESET, changed


def preset(generation: int = 1, uid: str = "u1", **spec: Any) -> dict[str, Any]:
    metadata = {"uid": uid, "generation": generation}
    return changed({"metadata": metadata, "spec": spec or {"engine": {"maxModelLen": 512}}}, VALID_PRESET)


def condition(backend: MemoryBackend, kind: str) -> dict[str, Any]:
    assert backend.stored is not None
    return next(dict(c) for c in backend.stored["status"]["conditions"] if c["type"] == kind)


def test_a_service_has_the_presets_fields_and_stands_alone_when_one_applies() -> None:
    resolved = resolve_service(VALID, [preset(generation=4)])
    assert resolved.preset == PresetStatus(
        name="preset", uid="u1", generation=4, chosen_by="Match", fields=["unified.engine.maxModelLen"]
    )
    assert resolved.service.spec.preset == "none"
    dumped = resolved.service.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert resolve_service({**VALID, "spec": dumped}, [preset(engine={"maxModelLen": 64})]).service.spec == (
        resolved.service.spec
    )


def test_a_service_without_a_preset_keeps_its_revision() -> None:
    resolved = resolve_service(VALID, [preset(match={"families": ["other"]}, image="other:1")])
    assert resolved.preset is None
    assert resolved.service == parse_service(VALID)
    same = changed({"spec": {"unified": {"engine": {"maxModelLen": 512}}}})
    assert service_revision(resolve_service(VALID, [preset()]).service, "e") == service_revision(
        parse_service(same), "e"
    )


def test_the_preset_is_named_when_its_fields_are_at_fault() -> None:
    doubled = preset(resources={"limits": {"nvidia.com/gpu": 1}})
    service = changed({"spec": {"preset": "preset", "unified": {"parallelism": {"tensor": 2}}}})
    with pytest.raises(InvalidServiceError, match=r"InferencePreset preset: spec\.unified"):
        resolve_service(service, [doubled])
    with pytest.raises(InvalidServiceError) as caught:
        resolve_service(changed({"spec": {"unified": {"replicas": -1}}}), [preset()])
    assert "InferencePreset" not in str(caught.value)


@pytest.mark.parametrize("spec", [None, 3, [], {"model": 3}, {"preset": 3, "unified": {}}])
def test_a_document_is_refused_when_its_spec_has_another_shape(spec: Any) -> None:
    with pytest.raises(InvalidServiceError, match="spec"):
        resolve_service({**VALID, "spec": spec}, [preset()])


@pytest.mark.parametrize(
    ("presets", "outdated"),
    [([preset()], False), ([preset(2)], True), ([preset(uid="u2")], True), ([], True), (None, True)],
)
def test_a_service_is_outdated_when_another_generation_applies(
    presets: list[dict[str, Any]] | None, outdated: bool
) -> None:
    status = {"preset": {"name": "preset", "uid": "u1", "generation": 1}}
    assert is_outdated({**VALID, "status": status}, presets) == outdated
    assert is_outdated({**changed({"spec": {"preset": "preset"}}), "status": status}, presets) == outdated
    assert is_outdated(VALID, presets) == bool(presets)


async def test_engines_roll_and_the_status_says_why_when_a_preset_changes() -> None:
    backend = MemoryBackend(changed({"metadata": {"generation": 1, "uid": "s"}}))
    backend.stored_presets = [preset()]
    await settle(backend)
    assert backend.stored is not None
    first = backend.stored["status"]["revision"]
    assert backend.stored["status"]["preset"]["generation"] == 1
    backend.stored_presets = [preset(2, engine={"maxModelLen": 1024})]
    await settle(backend)
    assert backend.stored["status"]["revision"] != first
    assert backend.ready() == ("True", "AllReplicasReady")
    assert [m for _, reason, m in backend.events if reason == "PresetApplied"] == [
        f"InferencePreset preset, generation {n}, sets unified.engine.maxModelLen" for n in (1, 2)
    ]
    backend.stored_presets = []
    await settle(backend)
    assert "preset" not in backend.stored["status"]
    assert [reason for _, reason, _ in backend.events].count("PresetRemoved") == 1


async def test_engines_go_on_when_the_named_preset_is_deleted() -> None:
    backend = MemoryBackend(changed({"metadata": {"generation": 1}, "spec": {"preset": "preset"}}))
    backend.stored_presets = [preset()]
    await settle(backend)
    workloads = backend.workloads
    backend.stored_presets = []
    await reconcile(backend)
    assert backend.workloads == workloads
    assert backend.ready() == ("False", "PresetNotFound")
    assert condition(backend, "Stalled")["reason"] == "PresetNotFound"
    assert condition(backend, "Available")["status"] == "True"
    backend.stored_presets = [preset(uid="u2")]
    await settle(backend)
    assert backend.ready() == ("True", "AllReplicasReady")


def test_a_paused_service_keeps_its_preset_in_the_status() -> None:
    before = {"preset": {"name": "preset", "uid": "u1", "generation": 1, "chosenBy": "Name", "fields": ["image"]}}
    paused = resolve_service(changed({"spec": {"rollout": {"paused": True}, "preset": "none"}}), [])
    kept = preset_in_force(paused, before)
    assert kept is not None
    assert kept.model_dump(by_alias=True) == before["preset"]
    assert preset_event(before, kept) is None
    assert preset_in_force(resolve_service(VALID, []), before) is None


def test_undo_leaves_no_preset_that_would_change_what_was_restored() -> None:
    kept = {"model": {"uri": "demo"}, "unified": {"engine": {"maxModelLen": 256}}}
    assert restored_spec(VALID, kept)["unified"]["engine"] == {"maxModelLen": 256}
    assert "preset" not in restored_spec(VALID, kept)
    status = {"preset": {"name": "preset"}}
    assert restored_spec({**VALID, "status": status}, kept)["preset"] == "none"
