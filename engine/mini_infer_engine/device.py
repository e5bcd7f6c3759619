"""Which device an engine uses, and how host arrays get there. The one module that asks torch what machine this is."""

import os

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.config.cores import available_cores, threads_for
from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings


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


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A host array on the device; through pinned memory, so that a copy to a GPU is only queued."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
