from pathlib import Path

import pytest
import torch

from mini_infer_engine import device
from mini_infer_engine.device import available_cores, choose_threads, threads_for


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (0.5, 1), (2, 1), (2.5, 2), (4, 3), (64, 63)])
def test_one_core_is_left_to_the_host(cores: float, threads: int) -> None:
    assert threads_for(cores) == threads


@pytest.mark.parametrize(("limit", "cores"), [("50000 100000", 0.5), ("max 100000", None), (None, None), ("?", None)])
def test_a_containers_limit_is_respected(
    limit: str | None, cores: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_CPU_LIMIT", tmp_path / "cpu.max")
    without = available_cores()
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    assert available_cores() == (without if cores is None else cores)


def test_a_number_of_threads_that_is_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(2)
        choose_threads()
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        choose_threads()
        assert torch.get_num_threads() == threads_for(available_cores())
    finally:
        torch.set_num_threads(before)
