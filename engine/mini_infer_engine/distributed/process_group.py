"""Creates a group's store and its process group of torch.distributed: gloo between CPUs, NCCL between GPUs."""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]  # torch's

from mini_infer_engine.communication.collectives import Collectives, GlooCollectives, NoCollectives
from mini_infer_engine.communication.stage_link import GlooLink, LateLink
from mini_infer_engine.config.options.settings import EngineSettings, ranks_per_node
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from mini_infer_engine.communication.peer_memory import PeerMemory

_MEETING = timedelta(minutes=30)
"""Time-out for all ranks to connect: the slowest one has to read its weights. Heartbeats detect a rank that ends
meanwhile at once.
"""
LOOPBACK = "127.0.0.1"


def open_store(port: int = 0) -> TCPStore:
    """Opens the first rank's store, at a free port for this machine alone, or at `port` for other machines."""
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
    """Connects another rank to the store."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_MEETING)


def _gloo(store: Store, host: str, rank: int, size: int) -> torch.distributed.ProcessGroup:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _MEETING
    return cast("torch.distributed.ProcessGroup", ProcessGroupGloo(store, rank, size, options))


class LateGroup:
    """Collectives of a rank's stage, and its link to other stages. Both form once all ranks have their weights."""

    def __init__(self, parallel: TensorParallel, stage: int = 0, num_stages: int = 1) -> None:
        """Creates a group that is not connected yet. `parallel` is the rank's place in its stage."""
        self.parallel = parallel
        self.link = LateLink(stage, num_stages)
        self._connected: Collectives | None = None

    def connect(self, store: Store, host: str, device: torch.device, settings: EngineSettings) -> None:
        """Forms the group, with all ranks at the same time. `host` is this machine's address for other ranks."""
        if device.type == "cuda":
            from mini_infer_engine.communication.gpu_collectives import connect_gpus

            self._connected = connect_gpus(
                self.parallel,
                store,
                device,
                one_host=ranks_per_node(settings) % self.parallel.size == 0,
                disabled=settings.disable,
                link=self.link,
            )
            return
        parallel, link = self.parallel, self.link
        self._connected = NoCollectives(parallel)
        if parallel.size > 1:
            group = _gloo(PrefixStore(f"gloo-{link.index}", store), host, parallel.rank, parallel.size)
            self._connected = GlooCollectives(parallel, group)
        if link.size > 1:
            rank, size = link.index * parallel.size + parallel.rank, link.size * parallel.size
            group = _gloo(PrefixStore("gloo-stages", store), host, rank, size)
            link.connect(GlooLink(link.index, link.size, rank, group))

    def release(self) -> None:
        """Aborts operations that wait for lost ranks; gloo detects them by itself."""
        release = getattr(self._connected, "release", None)
        if release is not None:
            release()

    @property
    def connected(self) -> Collectives:
        """The group's collectives. The group must have formed."""
        assert self._connected is not None, "the group has not come together yet"
        return self._connected

    @property
    def kind(self) -> str:
        """Name of the connected collectives."""
        return self.connected.kind

    @property
    def peers(self) -> "PeerMemory | None":
        """Peer memory of the connected collectives, if any."""
        return self.connected.peers

    def begin(self, hidden: Tensor) -> Tensor:
        """Sums embeddings by the connected collectives."""
        return self.connected.begin(hidden)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x by the connected collectives."""
        return self.connected.all_reduce(x)

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """Gathers columns by the connected collectives."""
        return self.connected.gather_columns(x, width, out)
