"""Starts the process of a rank other than the first: prepares the process and the interpreter before it
imports torch.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

import msgspec

from mini_infer_engine.distributed.rank_config import RankConfig
from mini_infer_process.interpreter import import_permanently
from mini_infer_process.logs import configure_logging, show_crashes

_PR_SET_PDEATHSIG = 1
"""Option of prctl (<sys/prctl.h>) for the signal that the kernel sends when the parent dies."""
_SWITCH_S = 0.0005
"""Seconds that the thread of results, or of KV transfer, waits for the interpreter lock of the thread that launches
passes. Python's default of 5 ms is longer than a step.
"""


def main() -> None:
    """Runs as `python -m mini_infer_engine.distributed.rank_process CONFIG`, which only the first rank starts."""
    show_crashes()
    try:
        config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RankConfig)
    except FileNotFoundError:
        return  # the first rank has left already, and taken its folder with it
    configure_logging(config.log_level, config.log_format, config.engine)
    sys.setswitchinterval(_SWITCH_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    import_permanently("torch")
    from mini_infer_engine.distributed.rank import run_rank

    status = run_rank(config) if os.getppid() == config.parent_pid else 0
    sys.stdout.flush()
    os._exit(status)  # threads of gloo and NCCL wait for ranks that are gone


if __name__ == "__main__":
    main()
