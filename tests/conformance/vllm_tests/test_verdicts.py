from pathlib import Path

import pytest

from tests.conformance.vllm_tests import verdicts
from tests.conformance.vllm_tests.verdicts import DIFFERS, MISSING, NOT_A_SERVER_TEST, PASS, REASONS, Seen

LISTED: verdicts.Expected = {"a.py": {"one": PASS, "two": {DIFFERS: "why"}, "three": {NOT_A_SERVER_TEST: "why"}}}
AS_LISTED = {"a.py::one": Seen("passed"), "a.py::two": Seen("failed"), "a.py::three": Seen("skipped")}


def test_no_difference_is_reported_when_verdicts_are_as_listed() -> None:
    assert verdicts.differences(LISTED, AS_LISTED, ["a.py"]) == []


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"a.py::one": Seen("failed", "boom")}, "a.py::one: failed, listed as pass. boom"),
        ({"a.py::two": Seen("passed")}, "a.py::two: passed, listed as {'differs on purpose': 'why'}. "),
        ({"a.py::one": Seen("skipped")}, "a.py::one: skipped, listed as pass. "),
        ({"a.py::four": Seen("passed")}, "a.py::four: passed, and not listed. "),
    ],
)
def test_a_verdict_difference_is_reported_in_either_direction(change: dict[str, Seen], outcome: str) -> None:
    assert verdicts.differences(LISTED, AS_LISTED | change, ["a.py"]) == [outcome]


def test_a_listed_test_is_reported_when_it_did_not_run() -> None:
    seen = {"a.py::one": Seen("passed")}
    assert verdicts.differences(LISTED, seen) == []
    assert verdicts.differences(LISTED, seen, ["a.py"]) == ["a.py::two: did not run", "a.py::three: did not run"]


def test_seen_verdicts_are_merged_and_reasons_kept() -> None:
    seen = AS_LISTED | {"a.py::one": Seen("failed", "boom"), "b.py::x": Seen("passed")}
    merged = verdicts.merged(LISTED, seen)
    assert merged["a.py"] == {"one": {MISSING: "boom"}, "two": {DIFFERS: "why"}, "three": {NOT_A_SERVER_TEST: "why"}}
    assert merged["b.py"] == {"x": PASS}
    assert LISTED["a.py"]["one"] == PASS
    again = verdicts.merged(merged, {"a.py::one": Seen("failed", "another")})
    assert again["a.py"]["one"] == {MISSING: "another"}, "what nobody has judged yet is told anew"


def test_the_list_of_verdicts_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "expected.yaml"
    verdicts.write(LISTED, path)
    assert verdicts.read(path) == LISTED


def test_every_committed_verdict_is_known_and_has_a_reason() -> None:
    for tests in verdicts.read().values():
        for name, verdict in tests.items():
            if verdict != PASS:
                assert isinstance(verdict, dict), name
                ((word, reason),) = verdict.items()
                assert word in REASONS, name
                assert reason, name
