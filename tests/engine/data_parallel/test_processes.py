"""Engines of a server get one pool of main memory for evicted blocks, unless they have one, or cannot share it."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.data_parallel.processes import shared_tier

SETTINGS = EngineSettings(model="demo", data_parallel_size=2, kv_host_memory=1 << 20)


def test_engines_share_memory_when_they_keep_evicted_blocks() -> None:
    with shared_tier(SETTINGS) as settings:
        path = settings.kv_host_path
        assert path is not None
        assert path.startswith(f"/proc/{os.getpid()}/fd/")
        assert Path(path).stat().st_size == 0  # the first engine makes its contents
    assert not Path(path).exists()


@pytest.mark.parametrize(
    "options", [{"kv_host_memory": 0}, {"kv_host_path": "/dev/shm/mine"}, {"tensor_parallel_size": 2}]
)
def test_settings_stay_when_there_is_nothing_to_share(options: dict[str, object]) -> None:
    settings = replace(SETTINGS, **options)
    with shared_tier(settings) as found:
        assert found is settings
