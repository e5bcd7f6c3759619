"""Settings of the Python interpreter for processes that import much, and whose event loop serves many beside threads
that tokenise.

A start should be quick, and no pause long.
"""

import contextlib
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Final

SWITCH_INTERVAL_S: Final = 0.001
"""Seconds for which a thread that tokenises may hold the interpreter while the event loop waits; Python's own is 5 ms.
"""
GARBAGE_THRESHOLDS: Final = (10_000, 20, 20)
"""Thresholds of Python's garbage collector: objects allocated, less those freed, until it scans the youngest
generation, and scans of one generation until it scans the next. Requests leave no reference cycles behind, so Python's
own 700 only made it scan requests that were still being served, for a sixth of all CPU time; 10,000 take 1 ms.
"""

NICENESS: Final = 10
"""Niceness of threads that tokenise, above that of the main thread: the event loop comes first where cores are few."""


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disables the garbage collector during imports: its scans of ever more modules are a quarter of torch's import
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_permanently(module: str) -> None:
    """Imports a module that stays as long as this process does: the garbage collector does not scan it later either."""
    with no_collection():
        importlib.import_module(module)
        gc.freeze()


@contextlib.contextmanager
def quick_switches(seconds: float) -> Iterator[None]:
    """Sets the time for which a thread may hold the interpreter while others wait, for the duration of the block."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def favour_event_loop() -> None:
    """Tunes the interpreter for the event loop; call it when everything long-lived has been imported and created."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    gc.collect()
    gc.freeze()  # What is here stays, and need not be looked through while requests wait.


def lower_thread_priority() -> None:
    """Gives the calling thread a lower priority than the main one: where cores are few the event loop comes first.

    Linux alone has a priority for each thread; elsewhere nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        of_main_thread = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, of_main_thread + NICENESS))
