"""The table of which tests run where names what there is."""

from tests.conftest import ON_CONTROL_PLANES, ROOT, SLOW, begun_elsewhere


def test_each_file_that_needs_a_control_plane_has_a_group() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests/operator").glob("test_*.py")
        if "pytest.mark.cluster" in path.read_text()
    }
    assert marked == set(ON_CONTROL_PLANES)


def test_slow_test_files_exist() -> None:
    assert [path for path in SLOW if not (ROOT / "tests" / path).exists()] == []


def test_each_worker_collects_all_files_in_another_order() -> None:
    files = [f"tests/test_{number}.py" for number in range(10)]
    collected = [begun_elsewhere(files, worker, 4) for worker in range(4)]
    assert [order[0] for order in collected] == [files[0], files[2], files[5], files[7]]
    assert all(sorted(order) == files for order in collected)
