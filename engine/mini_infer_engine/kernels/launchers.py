"""Serialises the loading of Triton's launchers, and launches kernels without Triton's look-up.

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


class Relaunched:
    """Launches one kernel again and again. From the second launch on the host no longer looks up what Triton has
    compiled for these arguments, which takes it longer than the launch itself.

    So the arguments of all launches must have the types of the first one's: whole numbers of as many bits, tensors that
    are aligned alike, the same constants.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        """Takes a kernel, and options of its compilation such as `num_warps`."""
        self._kernel, self._options = kernel, options
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launches the kernel on the current stream, with the values of all parameters in their order."""
        if self._compiled is None:
            self._compiled = self._kernel[grid](*arguments, **self._options)  # None under Triton's interpreter
        else:
            self._compiled[grid](*arguments)
