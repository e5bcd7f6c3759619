"""The table of which tests run where names what there is."""

from tests.conftest import GROUPS, ROOT, SLOW


def test_each_file_that_needs_a_control_plane_has_a_group() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests/operator").glob("test_*.py")
        if "pytest.mark.cluster" in path.read_text()
    }
    assert marked == set(GROUPS)


def test_slow_files_are_there() -> None:
    assert [path for path in SLOW if not (ROOT / "tests" / path).exists()] == []
