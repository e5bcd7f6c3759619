"""A group's meeting point and its process group of torch.distributed: gloo between CPUs, NCCL between GPUs."""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]  # torch's

from mini_infer_engine.config.settings import EngineSettings
from mini_infer_engine.distributed.collectives import Collectives, GlooCollectives
from mini_infer_engine.distributed.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from mini_infer_engine.distributed.peer_memory import PeerMemory

_MEETING = timedelta(minutes=30)
"""For all ranks to come: the slowest has to read its weights. Who dies meanwhile is missed at once, see `signs`."""
LOOPBACK = "127.0.0.1"


def open_store(port: int = 0) -> TCPStore:
    """The first rank's store: at a free port of this machine alone, or at `port` for other machines."""
    if port:
        return TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=_MEETING)
    listening = socket.create_server((LOOPBACK, 0))  # by itself the store listens to other machines too
    return TCPStore(
        LOOPBACK,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=_MEETING,
        master_listen_fd=listening.detach(),
    )


def join_store(host: str, port: int) -> TCPStore:
    """Another rank's end."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_MEETING)


class LateCollectives:
    """Collectives of a group that forms once all ranks have their weights."""

    def __init__(self, parallel: TensorParallel) -> None:
        self.parallel = parallel
        self._connected: Collectives | None = None

    def connect(self, store: Store, host: str, device: torch.device, settings: EngineSettings) -> None:
        """Form the group, with all ranks at the same time; `host` is this machine as other ranks reach it."""
        if device.type == "cuda":
            from mini_infer_engine.distributed.gpu_collectives import connect_gpus

            self._connected = connect_gpus(
                self.parallel, store, device, one_host=settings.nnodes == 1, disabled=settings.disable
            )
            return
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = _MEETING
        rank, size = self.parallel.rank, self.parallel.size
        group = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
        self._connected = GlooCollectives(self.parallel, cast("torch.distributed.ProcessGroup", group))

    def release(self) -> None:
        """Break off what waits for ranks that are gone; gloo notices by itself."""
        release = getattr(self._connected, "release", None)
        if release is not None:
            release()

    @property
    def connected(self) -> Collectives:
        """The group's, which has formed."""
        assert self._connected is not None, "the group has not come together yet"
        return self._connected

    @property
    def kind(self) -> str:
        """See `Collectives.kind`."""
        return self.connected.kind

    @property
    def peers(self) -> "PeerMemory | None":
        """See `Collectives.peers`."""
        return self.connected.peers

    def begin(self, hidden: Tensor) -> Tensor:
        """See `Collectives.begin`."""
        return self.connected.begin(hidden)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        return self.connected.all_reduce(x)

    def begin_all_reduce_(self, x: Tensor) -> Callable[[], object]:
        """See `Collectives.begin_all_reduce_`."""
        return self.connected.begin_all_reduce_(x)

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """See `Collectives.gather_columns`."""
        return self.connected.gather_columns(x, width, out)
