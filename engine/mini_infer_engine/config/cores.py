"""Counts the cores that this process may use, and the threads that may compute on them. It starts none and knows no
torch.
"""

import math
import os
from pathlib import Path

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def threads_for(cores: float) -> int:
    """Returns the number of threads that compute on so many cores; a container's limit may make them a fraction."""
    return max(1, math.ceil(cores) - 1)


def available_cores() -> float:
    """Returns the cores that this process may use: its affinity, or its container's CPU limit (cgroup v2) if that is
    less.
    """
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    try:
        quota, period = _CPU_LIMIT.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return cores
