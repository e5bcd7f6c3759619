"""Launchers of kernels that threads load at the same time."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from mini_infer_engine.kernels.launchers import OneAtATime, load_launchers_one_at_a_time


class Shared:
    """As Python does with C extensions of one name: one module object, whose function is the last one's."""

    function = ""


def load(source: str, metadata: None) -> str:
    """What `CudaLauncher` does: load, then take the function."""
    Shared.function = source
    time.sleep(0.001)
    return Shared.function


def test_launchers_compile_one_function_per_thread() -> None:
    launcher = OneAtATime(load)
    names = [str(number) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda name: launcher(name, None), names)) == names


def test_tritons_driver_is_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="needs triton")
    driver = SimpleNamespace(launcher_cls=load)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    load_launchers_one_at_a_time()
    first = driver.launcher_cls
    load_launchers_one_at_a_time()
    assert driver.launcher_cls is first
    assert first("own", None) == "own"
