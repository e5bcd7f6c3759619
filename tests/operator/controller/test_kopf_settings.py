import itertools

import kopf
from kopf._cogs.structs.references import Resource

from mini_infer_operator.controller.kopf_settings import LONGEST_BACKOFF_S, Backoffs, configure, watched
from mini_infer_operator.handlers import register


def resource_of(plural: str) -> Resource:
    (kind,) = [kind for kind in watched() if kind.plural == plural]
    return Resource(group=kind.group, version=kind.version, plural=plural, kind=kind.name, namespaced=True)


def test_the_server_selects_by_label_when_a_kind_is_made_by_others_too() -> None:
    settings = kopf.OperatorSettings()
    configure(settings, scans=False)
    selectors = settings.watching.label_selectors
    for kind in watched():
        expected = ["serving.mini-infer.io/service"] if kind.is_labelled else []
        assert selectors.collect(resource_of(kind.plural)) == expected, kind.plural


def test_kopf_backoffs_are_endless_and_bounded() -> None:
    pauses = list(itertools.islice(Backoffs(), 200))
    assert len(pauses) == 200
    assert max(pauses) <= 1.2 * LONGEST_BACKOFF_S
    assert pauses[0] < 1
    assert next(iter(Backoffs())) < 1  # from the beginning for every request


def test_kopf_asks_for_no_rights_on_crds_and_namespaces_when_it_is_embedded() -> None:
    settings = kopf.OperatorSettings()
    configure(settings, scans=False)
    assert settings.scanning.disabled
    assert settings.peering.standalone


def test_no_kopf_handler_needs_finalizers_or_progress_storage() -> None:
    registry = register(kopf.OperatorRegistry(), clusterwide=True)
    assert registry._changing.get_all_handlers() == []
    assert registry._spawning.get_all_handlers() == []
    assert {handler.id for handler in registry._watching.get_all_handlers()} == {kind.plural for kind in watched()}


def test_kopf_watches_nothing_outside_namespaces_when_it_is_given_some() -> None:
    registry = register(kopf.OperatorRegistry(), clusterwide=False)
    seen = {handler.id for handler in registry._watching.get_all_handlers()}
    assert seen == {kind.plural for kind in watched() if kind.namespaced} != {kind.plural for kind in watched()}


def test_kopf_storages_copy_nothing_of_an_object() -> None:
    settings = kopf.OperatorSettings()
    configure(settings, scans=False)
    body = kopf.Body({"metadata": {"annotations": {"a": "b"}}, "spec": {"large": ["x"]}})
    assert settings.persistence.diffbase_storage.build(body=body) == {}
    assert settings.persistence.diffbase_storage.fetch(body=body) is None
