"""Detects from the kernel and UCX's environment variables how peers can reach this process's GPU memory."""

import os
from collections.abc import Mapping
from pathlib import Path

from mini_infer_engine.kv_transfer.topology.path_selection import Place

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = ("ipc", "pid")
"""Namespaces that two processes must share so that CUDA can open memory of one in the other."""
_RDMA_DEVICES = Path("/sys/class/infiniband")
_NO_FILTER = ("", "all")
_CUDA_IPC = {"cuda", "cuda_ipc"}
_RDMA = ("ib", "rc", "dc", "ud")
"""Prefixes of UCX's names of RDMA transports: rc_mlx5, dc_x, ..."""


def place_of_this_process() -> Place:
    """Returns the place of this process, with the machine's present devices."""
    has_rdma_device = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
    return read_place(os.environ, host_domain(), has_rdma_device=has_rdma_device)


def read_place(environment: Mapping[str, str], ipc_domain: str, *, has_rdma_device: bool) -> Place:
    """Returns the place that remains if `UCX_TLS` excludes some transports."""
    allowed = environment.get("UCX_TLS", "")
    names = {name.strip() for name in allowed.split(",")}
    if allowed in _NO_FILTER:
        return Place(ipc_domain=ipc_domain, has_rdma=has_rdma_device)
    if allowed.startswith("^"):
        names = {name.lstrip("^") for name in names}
        has_ipc, has_rdma = not names & _CUDA_IPC, not names & {"ib", "rc"}
    else:
        has_ipc, has_rdma = bool(names & _CUDA_IPC), any(name.startswith(_RDMA) for name in names)
    return Place(ipc_domain=ipc_domain if has_ipc else "", has_rdma=has_rdma_device and has_rdma)


def host_domain() -> str:
    """Returns a name that processes share if they are on one host and in the same IPC and PID namespaces. It is empty
    if /proc cannot be read.
    """
    try:
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
        return "/".join([_BOOT_ID.read_text().strip(), *namespaces])
    except OSError:
        return ""
