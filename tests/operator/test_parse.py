"""Files of InferenceServices that cannot be read, and services that stay parsed."""

from pathlib import Path

import pytest

from mini_infer_operator.parse import InvalidServiceError, parse_service, read_file
from tests.support.services import changed


@pytest.mark.parametrize(
    "content", ["[" * 5000, "a: " + "9" * 5000, "a: !!float x", "a: !!timestamp 2026-13-45", "\xff"]
)
def test_a_file_is_named_when_it_cannot_be_read(content: str, tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidServiceError, match=r"service\.yaml"):
        read_file(path)


def test_a_service_is_parsed_anew_only_when_something_that_is_read_changed() -> None:
    first = parse_service(changed({"metadata": {"uid": "u", "resourceVersion": "1"}, "status": {"url": "before"}}))
    again = parse_service(changed({"metadata": {"uid": "u", "resourceVersion": "2"}, "status": {"url": "after"}}))
    assert again is first
    assert parse_service(changed({"metadata": {"uid": "another"}})).metadata.uid == "another"
    assert parse_service(changed({"spec": {"unified": {"replicas": 5}}})).roles["unified"].replicas == 5
    for replicas in (1.0, float("nan"), 10**30, {1}):
        with pytest.raises(InvalidServiceError, match=r"spec\.unified\.replicas"):
            parse_service(changed({"spec": {"unified": {"replicas": replicas}}}))


def test_a_text_that_is_no_unicode_is_named() -> None:
    with pytest.raises(InvalidServiceError, match=r"spec\.model\.name"):
        parse_service(changed({"spec": {"model": {"name": "half of a pair: \ud800"}}}))
