"""Gives a real engine a fault, by the variable CANARY_FAULT: slow, leak or crash, with a number after a colon.

Python imports this module at the start of every process that has this folder in PYTHONPATH. Only the process that runs
the model gets the fault.
"""

import os
import sys
import threading
import time
from typing import Any

LEAKED: list[bytes] = []


def main(kind: str, amount: float) -> None:
    """Waits until the engine's core is imported, and then does harm."""
    while not hasattr(sys.modules.get("mini_infer_engine.core.engine"), "Engine"):
        time.sleep(0.05)
    if kind == "slow":  # each pass takes so many milliseconds more
        engine: Any = sys.modules["mini_infer_engine.core.engine"]
        step = engine.Engine.step

        def slow_step(self: Any) -> Any:
            time.sleep(amount / 1000)
            return step(self)

        engine.Engine.step = slow_step
    elif kind == "leak":  # so many MiB a second
        while True:
            LEAKED.append(os.urandom(1 << 20) * max(1, round(amount)))
            time.sleep(1.0)
    elif kind == "crash":  # after so many seconds
        time.sleep(amount)
        os._exit(13)


if (fault := os.environ.get("CANARY_FAULT", "")) and "mini_infer_engine.core_process.entry" in sys.orig_argv:
    name, _, number = fault.partition(":")
    threading.Thread(target=main, args=(name, float(number)), daemon=True).start()
