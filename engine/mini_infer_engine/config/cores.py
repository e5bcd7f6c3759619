"""How many cores this process may use, and how many threads may compute on them. It starts none and knows no torch."""

import math
import os
from pathlib import Path

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def threads_for(cores: float) -> int:
    """Of so many cores, of which a container's limit may make a fraction."""
    return max(1, math.ceil(cores) - 1)


def available_cores() -> float:
    """Cores that this process may use: its affinity, or its container's CPU limit (cgroup v2) where that is less."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    try:
        quota, period = _CPU_LIMIT.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return cores
