"""Assigns GPUs to the engines of a server: the visible GPUs are divided among them in order."""

import ctypes
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def devices_of_engine(
    engine: int, engines: int, ranks: int, environment: Mapping[str, str], machine_gpus: int
) -> dict[str, str]:
    """Returns environment variables for the engine with this number; none if there are no GPUs, and all compute on the
    CPU.

    `ranks` is the number of GPUs of one engine. `machine_gpus` is the number of GPUs if the environment names none.
    Raises ValueError if there are too few.
    """
    named = environment.get(VISIBLE)
    if named is None:
        visible = [str(number) for number in range(machine_gpus)]
    else:
        visible = [name.strip() for name in named.split(",") if name.strip()]
    if not visible or visible[0] == "-1":
        return {}
    if len(visible) < engines * ranks:
        raise ValueError(
            f"data-parallel-size = {engines} engines of {ranks} GPU{'s' if ranks > 1 else ''} each need "
            f"{engines * ranks} GPUs, and this machine shows {len(visible)}: make one of the sizes smaller"
        )
    return {VISIBLE: ",".join(visible[engine * ranks : (engine + 1) * ranks])}


def count_gpus() -> int:
    """Counts the NVIDIA GPUs that this process may use, by NVML; 0 without its library."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if library.nvmlInit_v2() != 0:
        return 0
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    library.nvmlShutdown()
    return count.value
