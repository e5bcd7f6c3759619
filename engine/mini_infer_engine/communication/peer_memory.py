"""Memory of every GPU of a host that all of them read: summands and parts of logits for the one-shot kernels.

By torch's symmetric memory, without NVLink multicast. What is written, and when it may be written again, follows from
the order in which every rank calls these methods, which is the same on all: `kernels.all_reduce.one_shot` says why.
"""

import torch
import torch.distributed
from torch import Tensor

from mini_infer_engine.config.tensor_parallel import TensorParallel
from mini_infer_engine.kernels.all_reduce.one_shot import (
    MAX_PROGRAMS,
    gather_programs,
    launch_gather,
    launch_reduce,
)

LARGEST_SUM_BYTES = {2: 96 << 20, 4: 1 << 20, 8: 512 << 10}
"""By ranks. Here every GPU reads what all others have: of two no more bytes than any algorithm moves, else too many."""
_LOGITS_BYTES = 8 << 20


class PeerMemory:
    """One for each rank, made by all at the same time."""

    def __init__(
        self,
        parallel: TensorParallel,
        device: torch.device,
        *,
        pdl: bool,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """`pdl`: kernels are launched with programmatic dependent launch; `group`: of these ranks, None: of all."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._rank, self._world, self._pdl = parallel.rank, parallel.size, pdl
        self._sum_bytes = LARGEST_SUM_BYTES[parallel.size]
        # Two buffers of sums take turns, one is for embeddings, two of logits take turns; then signal pads.
        self._places = [0, self._sum_bytes, 2 * self._sum_bytes]
        self._logits_places = [3 * self._sum_bytes, 3 * self._sum_bytes + _LOGITS_BYTES]
        pads = 3 * self._sum_bytes + 2 * _LOGITS_BYTES
        size = pads + MAX_PROGRAMS * parallel.size * 4
        memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        group = group or torch.distributed.group.WORLD
        assert group is not None
        self._handle = symmetric_memory.rendezvous(memory, group)
        buffers = [self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(parallel.size)]
        self._memory: Tensor = buffers[parallel.rank]
        self._keeps = memory
        self._memory.zero_()
        self._memory[pads:].view(torch.int32).add_(0)  # `release` finds its kernel loaded: loading may wait for the GPU
        pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device)
        epochs = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        self._peers = (pointers, pointers + pads, epochs)
        self._turn = self._logits_turn = 0
        torch.cuda.synchronize(device)
        torch.distributed.barrier(group=group, device_ids=[device.index])  # nobody signals before all pads are zero

    def summand(self, rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Memory [rows, width] for what this rank adds to the next sum; None: it is too much for one shot."""
        if not rows or rows * width * dtype.itemsize > self._sum_bytes:
            return None
        self._turn ^= 1
        return self._view(self._places[self._turn], rows, width, dtype)

    def logits_part(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        """Memory [rows, columns] for this rank's part of logits; None: they are too many."""
        if not rows or gather_programs(rows, columns) > MAX_PROGRAMS or rows * columns * dtype.itemsize > _LOGITS_BYTES:
            return None
        self._logits_turn ^= 1
        return self._view(self._logits_places[self._logits_turn], rows, columns, dtype)

    def holds(self, x: Tensor) -> bool:
        """Whether x stands here."""
        begin = self._memory.data_ptr()
        return begin <= x.data_ptr() < begin + self._memory.numel()

    def sum_embeddings(self, hidden: Tensor) -> Tensor | None:
        """The sum of all ranks' hidden [tokens, width], at the start of a pass; None: it is too much for one shot.

        In memory of its own, so that a pass may begin while a peer is still in the last sum of the one before.
        """
        if not hidden.shape[0] or hidden.nbytes > self._sum_bytes:
            return None
        self._turn = 0
        place = self._view(self._places[2], hidden.shape[0], hidden.shape[1], hidden.dtype)
        place.copy_(hidden)
        return self.sum(place)

    def sum(self, summand: Tensor) -> Tensor:
        """The sum of all ranks' summands [rows, width], in new memory."""
        return launch_reduce(
            self._peers,
            self._offset(summand),
            torch.empty_like(summand),
            rank=self._rank,
            world=self._world,
            pdl=self._pdl,
        )

    def sum_add_norm(self, summand: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum to the residual [rows, width], dense, in place: what is returned is its RMSNorm."""
        return launch_reduce(
            self._peers,
            self._offset(summand),
            torch.empty_like(residual),
            rank=self._rank,
            world=self._world,
            residual=residual,
            weight=weight,
            eps=eps,
            pdl=self._pdl,
        )

    def gather(self, part: Tensor, out: Tensor) -> Tensor:
        """All ranks' parts [rows, columns] side by side in out [rows, width], dense."""
        return launch_gather(
            self._peers, self._offset(part), out, part.shape[1], rank=self._rank, world=self._world, pdl=self._pdl
        )

    def release(self) -> None:
        """Let this GPU's kernels that wait for a peer go on, with whatever is there: the group is over."""
        begin = self._logits_places[1] + _LOGITS_BYTES
        pads = self._memory[begin:].view(torch.int32)
        # Before what has been launched already and waits for room behind the kernels that wait.
        beside = torch.cuda.Stream(pads.device, priority=-1)  # type: ignore[no-untyped-call]  # torch's
        with torch.inference_mode(), torch.cuda.stream(beside):
            pads.add_(1 << 30)  # far ahead of what any of them waits for, for their differences count
        beside.synchronize()

    def _view(self, place: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._memory[place : place + rows * width * dtype.itemsize].view(dtype).view(rows, width)

    def _offset(self, x: Tensor) -> int:
        return (x.data_ptr() - self._memory.data_ptr()) // x.itemsize
