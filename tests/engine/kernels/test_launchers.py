"""Launchers of kernels that threads load at the same time."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from mini_infer_engine.kernels.launchers import OneAtATime, Relaunched, load_launchers_one_at_a_time


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


class Kernel:
    """A launch returns what was compiled, which can be launched by itself, as that of Triton's kernels does."""

    def __init__(self, name: str, launches: list[Any], compiled: "Kernel | None" = None) -> None:
        self._name, self._launches, self._compiled = name, launches, compiled

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> "Kernel | None":
            self._launches.append((self._name, grid, arguments, options))
            return self._compiled

        return launch


def test_kernel_is_looked_up_once_when_it_is_launched_again() -> None:
    launches: list[Any] = []
    launch = Relaunched(Kernel("looked up", launches, Kernel("compiled", launches)), num_warps=8)
    for size in (1, 2, 3):
        launch((size, 1, 1), "words", size)
    assert launches == [
        ("looked up", (1, 1, 1), ("words", 1), {"num_warps": 8}),
        ("compiled", (2, 1, 1), ("words", 2), {}),
        ("compiled", (3, 1, 1), ("words", 3), {}),
    ]


def test_kernel_is_launched_as_it_is_when_nothing_is_compiled() -> None:
    launches: list[Any] = []
    launch = Relaunched(Kernel("interpreted", launches), num_warps=8)
    for _ in range(2):
        launch((1, 1, 1))
    assert launches == [("interpreted", (1, 1, 1), (), {"num_warps": 8})] * 2
