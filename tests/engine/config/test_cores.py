from pathlib import Path

import pytest

from mini_infer_engine.config import cores as cores_module
from mini_infer_engine.config.cores import available_cores, threads_for


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (0.5, 1), (2, 1), (2.5, 2), (4, 3), (64, 63)])
def test_one_core_is_reserved_for_the_host(cores: float, threads: int) -> None:
    assert threads_for(cores) == threads


@pytest.mark.parametrize(("limit", "cores"), [("50000 100000", 0.5), ("max 100000", None), (None, None), ("?", None)])
def test_available_cores_respect_the_containers_cpu_limit(
    limit: str | None, cores: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores_module, "_CPU_LIMIT", tmp_path / "cpu.max")
    without = available_cores()
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    assert available_cores() == (without if cores is None else cores)
