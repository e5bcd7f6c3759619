"""Weights that a thread loads are waited for, and its faults are those of whoever waits."""

from threading import Event

import pytest

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.runtime.weight_loading import WeightLoading
from mini_infer_engine.weight_transfer.exchange import LoadedWeights

PEER = LoadedWeights(source="peer", peer="other")


def test_weights_are_there_at_once_when_they_were_loaded_before() -> None:
    assert WeightLoading(PEER).wait() is PEER


def test_the_caller_goes_on_when_a_thread_loads() -> None:
    begun = Event()

    def load() -> LoadedWeights:
        assert begun.wait(10)
        return PEER

    loading = WeightLoading.begin(load)
    begun.set()
    assert loading.wait() is PEER
    assert loading.wait() is PEER


def test_a_fault_of_the_files_reaches_the_caller_when_it_waits() -> None:
    def load() -> LoadedWeights:
        raise ModelError("model.safetensors: truncated")

    with pytest.raises(ModelError, match="truncated"):
        WeightLoading.begin(load).wait()
