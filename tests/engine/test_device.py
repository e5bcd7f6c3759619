import pytest
import torch

from mini_infer_engine.config.cores import available_cores, threads_for
from mini_infer_engine.device import choose_threads


def test_the_number_of_threads_stays_when_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
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
