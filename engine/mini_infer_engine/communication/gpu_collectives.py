"""Implements collectives of ranks with a GPU each: NCCL for large messages, kernels over peer memory for small ones."""

import logging
import os
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's

from mini_infer_engine.communication.collectives import Collectives, NoCollectives
from mini_infer_engine.communication.gpu_stage_link import NcclLink
from mini_infer_engine.communication.peer_memory import LARGEST_SUM_BYTES, PeerMemory
from mini_infer_engine.communication.stage_link import LateLink
from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.kernels.policy import kernel_policy

logger = logging.getLogger(__name__)

_UNTAKEN = timedelta(days=365)
"""Time-out of sends between stages: the receiver takes them with its next pass, which may be tomorrow, and NCCL's
watchdog would end the process. Heartbeats detect lost ranks instead.
"""


class GpuCollectives:
    """Implements `Collectives` on GPUs. It works in CUDA graphs, which all ranks capture and replay in
    the same order.
    """

    def __init__(
        self, parallel: TensorParallel, peers: PeerMemory | None, group: torch.distributed.ProcessGroup | None = None
    ) -> None:
        """Wraps the group of these ranks; None means all ranks of the process group."""
        self.parallel, self.peers, self._group = parallel, peers, group

    @property
    def kind(self) -> str:
        """Name of the implementation, for the log and /metrics."""
        return "nccl" if self.peers is None else "one_shot+nccl"

    def release(self) -> None:
        """Aborts operations that wait for a lost rank, so that the main thread can report it. Another thread calls
        this.
        """
        if self.peers is not None:
            self.peers.release()
        _abort()

    def begin(self, hidden: Tensor) -> Tensor:
        """Sums the embeddings over peer memory if they fit, else by NCCL."""
        total = None if self.peers is None else self.peers.sum_embeddings(hidden)
        return self.all_reduce(hidden) if total is None else total

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over peer memory if it lies there, else by NCCL."""
        if not x.numel():
            return x
        if self.peers is not None and self.peers.contains(x):
            return self.peers.sum(x)
        x = x.contiguous()
        torch.distributed.all_reduce(x, group=self._group)
        return x

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """Gathers over peer memory if x lies there, else by NCCL."""
        rows = x.shape[0]
        if out is None:
            out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        if self.peers is not None and self.peers.contains(x) and out.is_contiguous():
            return self.peers.gather(x, out)
        parts = x.new_empty((self.parallel.size, *x.shape))
        torch.distributed.all_gather_into_tensor(parts, x.contiguous(), group=self._group)
        for begin, part in zip(range(0, width, x.shape[1]), parts, strict=False):
            columns = out[:, begin : begin + x.shape[1]]
            columns.copy_(part[:, : columns.shape[1]])
        return out


class NoGpuCollectives(NoCollectives):
    """Collectives of a rank that is alone in its pipeline stage."""

    def release(self) -> None:
        """Aborts operations that wait for a lost stage."""
        _abort()


def _abort() -> None:
    torch.distributed.distributed_c10d._abort_process_group()


def connect_gpus(
    parallel: TensorParallel,
    store: Store,
    device: torch.device,
    *,
    one_host: bool,
    disabled: tuple[str, ...],
    link: LateLink | None = None,
) -> Collectives:
    """Forms the group, with all ranks at the same time, and logs which implementation it uses.

    `link` is that of a pipeline, which is connected, too: its stages have groups of their own within the group of all
    ranks. Raises ValueError if this process is in another group already.
    """
    if torch.distributed.is_initialized():
        raise ValueError("this process has a group of GPUs already: run one parallel model in a process")
    # NVLink multicast is not used: on machines whose fabric lacks it, asking for it fails.
    os.environ |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    # Stages have a communicator for each direction, which is what this warning asks for.
    os.environ["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] = "0"
    index, num_stages = (0, 1) if link is None else (link.index, link.size)
    rank, size = index * parallel.size + parallel.rank, num_stages * parallel.size
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    group = None
    if link is not None and num_stages > 1:
        group = _connect_stages(link, parallel, rank, size, device)
        if parallel.size == 1:
            return NoGpuCollectives(parallel)
    obstacle = _obstacle(parallel, device, one_host=one_host, disabled=disabled)
    peers = None
    if _on_all_ranks(not obstacle, device, group):
        try:
            policy = kernel_policy(device, disabled)
            peers = PeerMemory(parallel, device, pdl=policy.pdl, group=group)
            if Mechanism.PUSHED_SUMS in disabled:
                peers.pushed_rows = 0
            if Mechanism.OVERLAPPED_SUMS in disabled:
                peers.overlaps_sums = False
        except RuntimeError as error:
            obstacle = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if not _on_all_ranks(peers is not None, device, group):
            peers = None
    collectives = GpuCollectives(parallel, peers, group)
    if rank == 0:
        reason = f" (no one-shot all-reduce: {obstacle or 'another rank cannot'})" if peers is None else ""
        logger.info("ranks talk by %s%s", collectives.kind, reason)
    return collectives


def _connect_stages(
    link: LateLink, parallel: TensorParallel, rank: int, num_ranks: int, device: torch.device
) -> torch.distributed.ProcessGroup | None:
    """Connects the link, and returns the group of this rank's stage. Every rank makes all groups, in the same order."""
    everybody = list(range(num_ranks))
    forwards, backwards = (torch.distributed.new_group(everybody, backend="nccl", timeout=_UNTAKEN) for _ in range(2))
    link.connect(NcclLink(link.index, link.size, rank, forwards, backwards, device))
    if parallel.size == 1:
        return None
    stages = [everybody[begin : begin + parallel.size] for begin in range(0, num_ranks, parallel.size)]
    groups: list[torch.distributed.ProcessGroup]
    groups = [torch.distributed.new_group(ranks, backend="nccl") for ranks in stages]
    return groups[link.index]


def _obstacle(parallel: TensorParallel, device: torch.device, *, one_host: bool, disabled: tuple[str, ...]) -> str:
    """Returns the reason why the GPUs of the group cannot or may not read each other's memory, or an empty string."""
    if Mechanism.ONE_SHOT_ALL_REDUCE in disabled:
        return "it is disabled"
    if not one_host:
        return "the ranks are on several machines"
    if parallel.size not in LARGEST_SUM_BYTES:
        return f"{parallel.size} ranks, it is for {', '.join(map(str, LARGEST_SUM_BYTES))}"
    first = (device.index or 0) - parallel.rank  # the ranks of a stage are neighbours
    for peer in range(first, first + parallel.size):
        if peer != device.index and not torch.cuda.can_device_access_peer(device, peer):
            return f"GPU {device.index} cannot read the memory of GPU {peer}"
    return ""


def _on_all_ranks(is_so: bool, device: torch.device, group: torch.distributed.ProcessGroup | None) -> bool:
    """Returns True if `is_so` holds on every rank. The first call also checks that the GPUs reach each other at all."""
    count = torch.tensor([int(is_so)], device=device)
    torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MIN, group=group)
    return bool(count.item())
