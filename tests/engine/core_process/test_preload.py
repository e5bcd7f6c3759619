"""Libraries are mapped beside imports where a core process needs torch, and nothing depends on it."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mini_infer_engine.core_process import preload
from mini_infer_engine.core_process.preload import begin_preload


def test_torch_is_mapped_and_not_imported_when_libraries_are_preloaded() -> None:
    code = (
        "import sys; from mini_infer_engine.core_process.preload import begin_preload; "
        "begin_preload(opens_gpu=False).join(); "
        "assert 'torch' not in sys.modules; assert 'libtorch' in open('/proc/self/maps').read(); import torch"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("places", [None, [], ["/nowhere"]], ids=["no torch", "no folder", "no libraries"])
def test_nothing_is_mapped_when_there_is_no_torch(places: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = None if places is None else SimpleNamespace(submodule_search_locations=places)
    monkeypatch.setattr(preload, "find_spec", lambda name: spec)
    begin_preload(opens_gpu=False).join()


@pytest.mark.parametrize(("fails_at", "calls"), [(None, 3), ("cuInit", 1), ("cuDeviceGet", 2)])
def test_a_gpu_is_opened_when_there_is_one(
    fails_at: str | None, calls: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called = []

    def function(name: str) -> object:
        def call(*_: object) -> int:
            called.append(name)
            return int(name == fails_at)

        return call

    cuda = SimpleNamespace(**{name: function(name) for name in ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    preload._open_gpu()
    assert len(called) == calls


def test_nothing_is_opened_when_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    preload._open_gpu()
