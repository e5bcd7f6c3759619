"""Allocates memory that all GPUs of a host reach, for the kernels of `all_reduce`: it holds summands and parts of
logits.

It uses torch's symmetric memory, without NVLink multicast. All ranks call these methods in the same order, which
determines when a buffer is written and when it may be overwritten; `one_shot`, `pushed_sum` and `overlapped_sum`
explain why.
"""

from functools import partial

import torch
import torch.distributed
from torch import Tensor

from mini_infer_engine.communication.overlapped_sums import OverlappedSum, OverlappedSums
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.kernels.all_reduce.one_shot import MAX_PROGRAMS, Peers, launch_gather, launch_reduce
from mini_infer_engine.kernels.all_reduce.overlapped_sum import FLAG_BYTES, FLAGS
from mini_infer_engine.kernels.all_reduce.pushed_sum import (
    MARK,
    MAX_ROW_BYTES,
    MAX_ROWS,
    Inbox,
    inbox_bytes,
    launch_pushed_sum,
)

LARGEST_SUM_BYTES = {2: 96 << 20, 4: 1 << 20, 8: 512 << 10}
"""The largest sum in bytes, by the number of ranks. Every GPU reads the summands of all others: for two ranks no more
bytes than any algorithm moves, for more ranks too many if the sum is large.
"""
_BUFFER_BYTES = {2: 96 << 20, 4: 24 << 20, 8: 24 << 20}
"""Bytes of a buffer, by the number of ranks. It also takes a rank's part of the logits of some hundred rows, which
every algorithm moves.
"""
PUSHED_ROWS = 256
"""The most rows of sums that are written into the peers' memory; those of more rows are read from it."""
OVERLAPPED_ROWS = 6144
"""The fewest rows at which sums of two ranks overlap with products. The host needs some 40 ms for twice as many
launches, for which passes of fewer rows would wait: passes of 4,096 tokens of a 7B model took 50 ms on a quiet machine,
as without, and up to 70 ms beside the transfer thread. (Measured with 7B alone.)
"""


class PeerMemory:
    """The memory of one rank. All ranks construct it at the same time."""

    def __init__(
        self,
        parallel: TensorParallel,
        device: torch.device,
        *,
        pdl: bool,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """Allocates the memory and meets all ranks of `group` (None: of the process group). `pdl` launches kernels with
        programmatic dependent launch.
        """
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._rank, self._world, self._pdl = parallel.rank, parallel.size, pdl
        self.pushed_rows = PUSHED_ROWS
        self.overlaps_sums = parallel.size == 2
        self._sum_bytes, self._buffer_bytes = LARGEST_SUM_BYTES[parallel.size], _BUFFER_BYTES[parallel.size]
        # Two buffers of summands and logits take turns, one is for embeddings; then the inbox, signal pads and flags.
        inbox = 3 * self._buffer_bytes
        self._pads_begin = inbox + inbox_bytes(parallel.size)
        flags = self._pads_begin + MAX_PROGRAMS * parallel.size * 4
        size = flags + FLAGS * FLAG_BYTES
        memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        group = group or torch.distributed.group.WORLD
        assert group is not None
        # `rendezvous` holds the interpreter's lock until all ranks have come: where one is killed meanwhile, no thread
        # of this process could tell. This operator meets them, too, without the lock.
        torch.ops.symm_mem.one_shot_all_reduce(memory[:16].view(torch.bfloat16), "sum", group.group_name)
        self._handle = symmetric_memory.rendezvous(memory, group)
        buffers = [self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(parallel.size)]
        self._memory: Tensor = buffers[parallel.rank]
        self._peer_memory: Tensor = buffers[(parallel.rank + 1) % parallel.size]  # of two ranks the peer's
        self._keeps = memory
        self._memory.zero_()
        self._memory[inbox : self._pads_begin].view(torch.int32).fill_(MARK)
        pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device)
        epochs, row_epochs = (
            torch.zeros(count, dtype=torch.int32, device=device) for count in (MAX_PROGRAMS, MAX_ROWS)
        )
        self._released = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._peers = Peers(pointers, pointers + self._pads_begin, epochs, self._released)
        self._inbox = Inbox(pointers, inbox, row_epochs, self._released)
        self._overlapped = OverlappedSums(self._memory[flags:], self._peer_memory[flags:], self._released)
        self._parity = 0
        torch.cuda.synchronize(device)
        torch.distributed.barrier(group=group, device_ids=[device.index])  # nobody signals before all pads are zero

    def pushes(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Returns True if a sum of this shape is written into the peers' memory. Its summand may then be
        in any memory.
        """
        return 0 < rows <= self.pushed_rows and width * dtype.itemsize <= MAX_ROW_BYTES

    def can_sum(self, summands: Tensor) -> bool:
        """Returns True if `sum` and `sum_add_norm` accept these [rows, width], or [N, rows, width] if
        they are pushed.
        """
        rows, width = summands.shape[-2:]
        return self.contains(summands) or self.pushes(rows, width, summands.dtype)

    def summand(self, rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Returns memory [rows, width] for this rank's summand of the next sum, or None if it is too large for a
        one-shot sum.
        """
        return self._next(rows, width, dtype) if rows * width * dtype.itemsize <= self._sum_bytes else None

    def overlaps(self, rows: int, width: int, dtype: torch.dtype) -> bool:
        """Returns True if a sum of this shape is to overlap with the products around it, outside of CUDA graphs."""
        return self.overlaps_sums and rows >= OVERLAPPED_ROWS and rows * width * dtype.itemsize <= self._sum_bytes

    def begin_overlapped(self, rows: int, width: int, dtype: torch.dtype) -> OverlappedSum:
        """Begins a sum for which `overlaps` is True. Send and add both of its halves before any other call of this
        object.
        """
        received = self._next(rows, width, dtype)
        assert received is not None, "a sum of no rows does not overlap"
        assert not torch.cuda.is_current_stream_capturing(), "the numbers of sums are the host's"
        place = self._view(self._parity, rows, width, dtype, self._peer_memory)
        return self._overlapped.begin(received, place)

    def logits_part(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        """Returns memory [rows, columns] for this rank's part of the logits, or None if they are too many."""
        return self._next(rows, columns, dtype) if rows * columns * dtype.itemsize <= self._buffer_bytes else None

    def _next(self, rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        if not rows:
            return None
        self._overlapped.check_added()
        self._parity ^= 1
        return self._view(self._parity, rows, width, dtype)

    def contains(self, x: Tensor) -> bool:
        """Returns True if x lies in this memory."""
        begin = self._memory.data_ptr()
        return begin <= x.data_ptr() < begin + self._memory.numel()

    def sum_embeddings(self, hidden: Tensor) -> Tensor | None:
        """Returns the sum of all ranks' hidden [tokens, width], at the start of a pass, or None if it is too large for
        one shot.

        It has a buffer of its own, so that a pass may begin while a peer is still in the last sum of the previous one.
        """
        if not hidden.shape[0] or hidden.nbytes > self._sum_bytes:
            return None
        self._parity = 0
        place = self._view(2, hidden.shape[0], hidden.shape[1], hidden.dtype)
        place.copy_(hidden)
        return self.sum(place)

    def sum(self, summands: Tensor) -> Tensor:
        """Returns the sum of all ranks' summands as [rows, width] in new memory; `can_sum` must be True for them."""
        return self._reduced(summands, summands.new_empty(summands.shape[-2:]))

    def sum_add_norm(self, summands: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds the sum to the residual [rows, width], dense, in place, and returns the RMSNorm of the result."""
        return self._reduced(summands, torch.empty_like(residual), residual, weight, eps)

    def _reduced(
        self,
        summands: Tensor,
        out: Tensor,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        self._overlapped.check_added()
        rows, width = out.shape
        is_pushed = self.pushes(rows, width, out.dtype)
        launch = (
            partial(launch_pushed_sum, self._inbox, summands)
            if is_pushed
            else partial(launch_reduce, self._peers, self._offset(summands))
        )
        return launch(
            out,
            rank=self._rank,
            world=self._world,
            residual=residual,
            weight=weight,
            eps=eps,
            pdl=self._pdl,
        )

    def gather(self, part: Tensor, out: Tensor) -> Tensor:
        """Writes all ranks' parts [rows, columns] side by side to out [rows, width], dense."""
        return launch_gather(
            self._peers, self._offset(part), out, part.shape[1], rank=self._rank, world=self._world, pdl=self._pdl
        )

    def release(self) -> None:
        """Lets kernels of this GPU that wait for a peer go on, with arbitrary data, because the group has ended.

        It does not call the driver: a thread that makes it load a kernel may itself wait for them.
        """
        self._released.fill_(1)

    def _view(self, buffer: int, rows: int, width: int, dtype: torch.dtype, memory: Tensor | None = None) -> Tensor:
        """Returns a view of a buffer in this rank's memory, or in `memory` of another rank."""
        place, memory = buffer * self._buffer_bytes, self._memory if memory is None else memory
        return memory[place : place + rows * width * dtype.itemsize].view(dtype).view(rows, width)

    def _offset(self, x: Tensor) -> int:
        return (x.data_ptr() - self._memory.data_ptr()) // x.itemsize
