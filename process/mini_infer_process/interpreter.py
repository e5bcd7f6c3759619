"""How Python itself is set: where much is imported, and where an event loop serves many and threads tokenise beside it.

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
"""How long a thread that tokenises may hold the interpreter while the event loop wants it; Python's own is 5 ms."""
GARBAGE_THRESHOLDS: Final = (10_000, 20, 20)
"""Objects that may be made, beyond those that went, before the garbage collector looks through the youngest, and how
many such looks it takes until it looks through older ones. Requests leave no reference cycles behind, so Python's own
700 only made it look through requests that were still being served, for a sixth of all CPU time; 10,000 take 1 ms."""

NICENESS: Final = 10
"""Of threads that tokenise, above that of the main thread: the event loop comes first where cores are few."""


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """For imports: that the garbage collector looks through more and more modules is a quarter of torch's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_to_stay(module: str) -> None:
    """Import what stays as long as this process does: the garbage collector does not look through it later either."""
    with no_collection():
        importlib.import_module(module)
        gc.freeze()


def favour_event_loop() -> None:
    """To be called when all that stays has been imported and made."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    gc.collect()
    gc.freeze()  # What is here stays, and need not be looked through while requests wait.


def give_way() -> None:
    """The calling thread gets a lower priority than the main one: where cores are few the event loop comes first.

    Linux alone has a priority for each thread; elsewhere nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        of_main_thread = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, of_main_thread + NICENESS))
