"""Maps torch's shared libraries and opens the GPU in a thread that does not hold the interpreter.

Python imports modules meanwhile, which takes it for seconds. Nothing depends on it: torch finds the libraries mapped
and the context of the GPU made, or does both itself.
"""

import ctypes
import threading
from importlib.util import find_spec
from pathlib import Path

_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_python.so", ctypes.DEFAULT_MODE))
"""torch's own order and modes: the first brings the libraries of CUDA into everybody's reach."""


def begin_preload(*, opens_gpu: bool) -> threading.Thread:
    """Begins to map the libraries, and to open the first GPU if there is one."""
    thread = threading.Thread(target=_preload, args=(opens_gpu,), name="preload", daemon=True)
    thread.start()
    return thread


def _preload(opens_gpu: bool) -> None:
    if opens_gpu:
        threading.Thread(target=_open_gpu, name="open-gpu", daemon=True).start()
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return
    folder = Path(torch.submodule_search_locations[0]) / "lib"
    for name, mode in _LIBRARIES:
        try:
            ctypes.CDLL(str(folder / name), mode)
        except OSError:  # another build of torch: it maps its own
            return


def _open_gpu() -> None:
    """Makes the primary context of the first visible GPU, which torch uses."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
