"""Does in threads, beside imports, what takes long and does not need the interpreter: maps torch's shared libraries,
opens the GPU, and hashes Triton's compiler.

Nothing depends on it: torch finds the libraries mapped and the context of the GPU made, and Triton finds the hash, or
they do it themselves.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_python.so", ctypes.DEFAULT_MODE))
"""torch's own order and modes: the first brings the libraries of CUDA into everybody's reach."""


def begin_mapping_torch() -> threading.Thread:
    """Begins to map torch's libraries."""
    return _begun(_map_torch, "map-torch")


def begin_opening_gpu() -> threading.Thread:
    """Begins to open the first GPU if there is one."""
    return _begun(_open_gpu, "open-gpu")


def begin_hashing_compiler() -> threading.Thread | None:
    """Imports Triton, and begins to hash its compiler: 0.4 GB that the key of each kernel in its cache contains.

    Returns None if there is no Triton.
    """
    with contextlib.suppress(Exception):  # an engine that needs it reports what is wrong
        if find_spec("triton") is not None:
            from triton.runtime.cache import triton_key

            return _begun(triton_key, "hash-compiler")
    return None


def _begun(work: Callable[[], object], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _map_torch() -> None:
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return
    # As a foreign function: `ctypes.CDLL` would keep the interpreter while it maps.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    folder = Path(torch.submodule_search_locations[0]) / "lib"
    for name, mode in _LIBRARIES:
        if not dlopen(os.fsencode(folder / name), mode | os.RTLD_NOW):  # another build of torch: it maps its own
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
