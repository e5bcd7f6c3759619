import pytest

from mini_infer_operator.parse import parse_service
from mini_infer_operator.resource import InferenceService, once_a_service
from tests.support.services import changed


def test_a_function_of_a_service_runs_once_for_each_service_object_and_arguments() -> None:
    calls = []

    @once_a_service
    def named(service: InferenceService, suffix: str) -> str:
        calls.append(suffix)
        return service.metadata.name + suffix

    first, other = (parse_service(changed({"metadata": {"name": name}})) for name in ("first", "other"))
    assert [named(first, "-a"), named(first, "-a"), named(first, "-b"), named(other, "-a")] == [
        *("first-a", "first-a", "first-b", "other-a")
    ]
    assert calls == ["-a", "-b", "-a"]


def test_arguments_by_keyword_are_told_apart() -> None:
    @once_a_service
    def named(service: InferenceService, *, suffix: str) -> str:
        return service.metadata.name + suffix

    service = parse_service(changed({}))
    assert [named(service, suffix="-a"), named(service, suffix="-b")] == ["demo-a", "demo-b"]


def test_a_function_of_a_service_that_raised_runs_again() -> None:
    answers = iter([ValueError("not yet"), "now"])

    @once_a_service
    def answer(service: InferenceService) -> str:
        found = next(answers)
        if isinstance(found, ValueError):
            raise found
        return str(found)

    service = parse_service(changed({}))
    with pytest.raises(ValueError, match="not yet"):
        answer(service)
    assert answer(service) == "now"


def test_kept_results_change_neither_equality_nor_what_is_dumped() -> None:
    service, fresh = (InferenceService.model_validate(changed({})) for _ in range(2))
    assert once_a_service(lambda of: of.metadata.name)(service) == "demo"
    assert service == fresh
    assert service.model_dump() == fresh.model_dump()
