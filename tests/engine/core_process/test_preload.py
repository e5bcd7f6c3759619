"""Libraries are mapped beside imports where a core process needs torch, and nothing depends on it."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mini_infer_engine.core_process import preload
from mini_infer_engine.core_process.preload import begin_hashing_compiler, begin_mapping_torch

MAPPING = """
import sys, time
from mini_infer_engine.core_process.preload import begin_mapping_torch

thread = begin_mapping_torch()
turns = 0
while thread.is_alive():
    time.sleep(0.001)
    turns += 1
assert "torch" not in sys.modules
assert "libtorch" in open("/proc/self/maps").read()
assert turns > 5, "Python waited for the libraries"
import torch
"""


def test_torch_is_mapped_while_python_goes_on() -> None:
    subprocess.run([sys.executable, "-c", MAPPING], check=True, timeout=60)


@pytest.mark.parametrize("places", [None, [], ["/nowhere"]], ids=["no torch", "no folder", "no libraries"])
def test_nothing_is_mapped_when_there_is_no_torch(places: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = None if places is None else SimpleNamespace(submodule_search_locations=places)
    monkeypatch.setattr(preload, "find_spec", lambda name: spec)
    begin_mapping_torch().join()


@pytest.mark.parametrize("content", [None, "raise OSError('no library')", "triton_key = list"])
def test_the_compiler_is_hashed_where_there_is_one(
    content: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("triton", "triton.runtime", "triton.runtime.cache"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if content is None:
        monkeypatch.setattr(preload, "find_spec", lambda name: None)
    else:
        folder = tmp_path / "triton" / "runtime"
        folder.mkdir(parents=True)
        for path in (folder.parent / "__init__.py", folder / "__init__.py"):
            path.touch()
        (folder / "cache.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
    try:
        thread = begin_hashing_compiler()
        assert (thread is not None) is (content == "triton_key = list")
    finally:
        for name in ("triton", "triton.runtime", "triton.runtime.cache"):
            sys.modules.pop(name, None)  # or others would find this one


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
