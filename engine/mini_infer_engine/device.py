"""Chooses the device of an engine, and copies host arrays to it. No other module asks torch about this machine."""

import os

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.config.cores import available_cores, threads_for
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings


def choose_device(settings: EngineSettings) -> torch.device:
    """Returns the device that the settings name; "auto" is a GPU if torch sees one. Raises ModelError if the GPU is
    missing.
    """
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ModelError("device = 'cuda', but torch sees no GPU here: use 'cpu' or 'auto'.")
    if has_gpu and settings.device != "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def choose_threads(processes: int = 1) -> None:
    """Sets torch's threads on a CPU: all cores but one, which the scheduler and the HTTP process share, for
    `processes`.

    With a thread on every core, each operation waits for the core that another process uses: beside one busy process
    the demo model generates a twentieth of its tokens. `OMP_NUM_THREADS` takes precedence.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, threads_for(available_cores()) // processes))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copies a host array to the device, through pinned memory, so that a copy to a GPU is asynchronous."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
