"""Files of weights are read ahead where that helps, and nothing depends on it."""

import os
import subprocess
from pathlib import Path

import pytest

from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core_process import prefetch
from mini_infer_engine.core_process.prefetch import Prefetch, begin_prefetch
from mini_infer_engine.weight_transfer.file_rate import are_cached

PEER = "127.0.0.1:1"


def test_all_bytes_are_read_once_when_files_are_prefetched(tmp_path: Path) -> None:
    sizes = {"a": 9_000_000, "b": 1, "c": 0}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    found = Prefetch(lambda: [tmp_path / name for name in (*sizes, "missing")])
    found.join()
    assert found.num_bytes == sum(sizes.values())


@pytest.mark.parametrize(
    ("rate", "settings", "peers", "begins"),
    [
        (1e8, {}, (), True),
        (None, {}, (), False),
        (9e9, {}, (), False),
        (1e8, {}, (PEER,), False),
        (1e8, {"weights_from": "files"}, (PEER,), True),
        (1e8, {}, ("name.invalid:1",), True),
        (1e8, {"load_format": "dummy"}, (), False),
        (1e8, {"model": "/nowhere"}, (), False),
    ],
    ids=["disk", "unknown", "page cache", "peers", "no peer may be asked", "no peer is up", "dummy", "no model"],
)
def test_files_are_prefetched_when_they_are_slow_and_needed(
    rate: float | None, settings: dict[str, str], peers: tuple[str, ...], begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "file_bytes_per_s", lambda files: rate)
    monkeypatch.setattr(prefetch, "are_cached", lambda files: False)
    options: dict[str, str] = {"model": "demo"} | settings
    found = begin_prefetch(EngineSettings(**options), peers)  # type: ignore[arg-type]  # a test's table
    found.join()
    assert (found.num_bytes > 100_000) is begins


def test_files_are_not_read_when_they_are_in_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(1 << 20))
    assert are_cached([file])
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not are_cached([file]) or _in_memory(tmp_path)
    assert not are_cached([])


def _in_memory(folder: Path) -> bool:
    """True for file systems that have no disk behind them."""
    return subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True).stdout.strip() == "tmpfs"
