"""Serialises the loading of Triton's launchers.

A launcher is a C extension. All have one name, and Python has one module object for each name: if two threads load
launchers at the same time, one may get the other's function, and fails with "function takes exactly 42 arguments (33
given)" (Triton 3.6.0, `CudaLauncher`: `compile_module_from_src`, then `mod.launch`).
"""

from threading import Lock
from typing import Any


class OneAtATime:
    """Replaces a driver's class of launchers, and makes them under a lock."""

    def __init__(self, make: Any) -> None:
        self._make, self._lock = make, Lock()

    def __call__(self, source: Any, metadata: Any) -> Any:
        """Returns a launcher for a compiled kernel."""
        with self._lock:
            return self._make(source, metadata)


def load_launchers_one_at_a_time() -> None:
    """Serialises the loading of launchers in this process from now on. A second call does nothing."""
    import triton  # which is not installed on CPUs

    driver = triton.runtime.driver.active
    if not isinstance(driver.launcher_cls, OneAtATime):
        driver.launcher_cls = OneAtATime(driver.launcher_cls)
