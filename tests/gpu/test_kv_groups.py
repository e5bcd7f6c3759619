"""On a GPU all layers share one page table, whatever windows they have: nothing is freed before a sequence ends."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from tests.gpu.device import GPU_ONLY
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.tiny_models import save_tiny_model

pytestmark = GPU_ONLY


def test_layout_is_uniform_and_texts_are_those_without_groups_when_layers_have_windows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "gemma2", head_dim=64, sliding_window=32)
    caplog.set_level(logging.INFO)
    found = []
    for disabled in (False, True):
        settings = make_settings(tmp_path, max_model_len=256, disable_hybrid_kv_cache_manager=disabled)
        runner = make_runner(settings)
        assert runner.kv_cache.is_uniform
        assert runner.pool.spec.num_layers == len(runner.config.layers)
        found.append(texts(make_engine(settings, runner), mixed_requests(8, 199, 150)))
        memory = runner.memory.bytes_by_tag()
        assert memory["kv_cache"] == runner.pool.storage.nbytes
        assert min(memory["weights"], memory["workspace"]) > 0
    assert found[0] == found[1]
    assert sum("sliding windows" in record.getMessage() for record in caplog.records) == 2
