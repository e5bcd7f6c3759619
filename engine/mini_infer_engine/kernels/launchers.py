"""Triton's launchers, loaded by one thread at a time.

A launcher is a C extension; all have one name, and Python keeps one module object a name: of two that threads load at
the same time one may get the other's function, and says "function takes exactly 42 arguments (33 given)" (Triton 3.6.0,
`CudaLauncher`: `compile_module_from_src`, then `mod.launch`).
"""

from threading import Lock
from typing import Any


class OneAtATime:
    """In place of a driver's class of launchers."""

    def __init__(self, make: Any) -> None:
        self._make, self._lock = make, Lock()

    def __call__(self, source: Any, metadata: Any) -> Any:
        """A launcher for a compiled kernel."""
        with self._lock:
            return self._make(source, metadata)


def load_launchers_one_at_a_time() -> None:
    """Of this process, whatever kernels it launches from now on. Again: nothing."""
    import triton  # which is not installed on CPUs

    driver = triton.runtime.driver.active
    if not isinstance(driver.launcher_cls, OneAtATime):
        driver.launcher_cls = OneAtATime(driver.launcher_cls)
