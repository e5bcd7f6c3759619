"""Which device an engine uses, and how host arrays get there. The one module that asks torch what machine this is."""

import math
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.settings import EngineSettings

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def choose_device(settings: EngineSettings) -> torch.device:
    """The device that the settings name; auto: a GPU where torch sees one. ModelError: a GPU that is not there."""
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ModelError("device = 'cuda', but torch sees no GPU here: use 'cpu' or 'auto'.")
    if has_gpu and settings.device != "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def choose_threads(processes: int = 1) -> None:
    """Computing threads on a CPU: all cores but one, which the scheduler and the HTTP process share, for `processes`.

    With a thread a core, each operation waits for the core that something else uses: beside one busy process the
    demo model makes a twentieth of its tokens. `OMP_NUM_THREADS` goes before it.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, threads_for(available_cores()) // processes))


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


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A host array on the device; through pinned memory, so that a copy to a GPU is only queued."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
