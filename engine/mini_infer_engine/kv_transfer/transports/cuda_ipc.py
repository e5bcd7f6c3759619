"""Maps page pools on GPUs into other processes of this host by CUDA IPC, and copies between them by a kernel of our
own.

A handle refers to a whole allocation of cudaMalloc, in which the pool has an offset. Memory of the allocator's
expandable segments has no handle.
"""

import importlib

import numpy as np

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.cuda_driver import HANDLE_BYTES, CudaDriver, CudaError, IpcDriver
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.topology.mapped_memory import IsDone, SharedPool
from mini_infer_engine.kv_transfer.topology.peer_process import this_process
from mini_infer_engine.kv_transfer.transport import TransportError

_VECTOR_BYTES = 16


class _CudaMapping:
    def __init__(self, driver: IpcDriver, base: int, offset: int) -> None:
        self._driver, self._base = driver, base
        self.address = base + offset

    def close(self) -> None:
        """Unmaps the allocation."""
        self._driver.close(self._base)


def share_pool(driver: IpcDriver, memory: KVMemory) -> SharedPool:
    """Returns the handle by which other processes map a pool. Raises ModelError if its memory cannot be shared."""
    try:
        base, size = driver.range_of(memory.address)
        handle = driver.handle_of(base)
    except CudaError as error:
        raise ModelError(
            f"CUDA IPC cannot share the page pool ({error}): leave out expandable_segments of PYTORCH_CUDA_ALLOC_CONF, "
            "or choose --kv-transport nixl"
        ) from None
    return SharedPool(
        kind="cuda-ipc",
        process=this_process(),
        handle=handle,
        size=size,
        offset=memory.address - base,
        pool_bytes=memory.size,
    )


def open_pool(driver: IpcDriver, pool: SharedPool) -> _CudaMapping:
    """Maps another process's pool. Raises TransportError if CUDA IPC does not reach it, or the memory is not the one
    described.
    """
    if len(pool.handle) != HANDLE_BYTES:
        raise TransportError("that is no handle of CUDA IPC")
    try:
        base = driver.open(pool.handle)
    except CudaError as error:
        raise TransportError(f"CUDA IPC does not reach that engine's GPU from this one ({error})") from None
    mapping = _CudaMapping(driver, base, pool.offset)
    if driver.range_of(base)[1] != pool.size:
        mapping.close()
        raise TransportError("what CUDA IPC opens is not the memory that the other engine describes")
    return mapping


class CudaIpcMemory:
    """Implements `MappedMemory` on GPUs. Copies are queued on a stream of their own, and the pages that they read must
    have been computed.
    """

    def __init__(self, memory: KVMemory) -> None:
        """Shares the pool. Raises ModelError if it is not on a GPU, or cannot be shared."""
        if memory.device != "cuda":
            raise ModelError(
                "--kv-transport cuda-ipc moves pages between GPUs: in main memory choose shm, nixl or auto"
            )
        self._torch = importlib.import_module("torch")
        self._device = self._torch.device("cuda", memory.device_index)
        self.enter_thread()
        self._driver = CudaDriver()
        self.shared = share_pool(self._driver, memory)
        # Before what waits for room on the GPU: somebody waits for these bytes, and they are few.
        self._stream = self._torch.cuda.Stream(self._device, priority=-1)
        self._warm_up()

    def enter_thread(self) -> None:
        """Sets the thread's CUDA device: the current device and context are per thread."""
        self._torch.cuda.set_device(self._device)

    def open(self, pool: SharedPool) -> _CudaMapping:
        """Maps a pool by CUDA IPC."""
        return open_pool(self._driver, pool)

    def copy(self, pieces: np.ndarray, size: int) -> IsDone:  # pieces [pieces, 2] int64
        """Queues one kernel that copies all pieces."""
        from mini_infer_engine.kernels.copy_pieces import copy_pieces

        torch = self._torch
        is_aligned = not (size % _VECTOR_BYTES or (pieces % _VECTOR_BYTES).any())
        with torch.cuda.stream(self._stream):
            # From pinned memory, or the driver may wait for the stream before it takes the table.
            table = torch.empty(pieces.shape, dtype=torch.int64, pin_memory=True)
            table.numpy()[:] = pieces
            if len(pieces):
                copy_pieces(table.to(self._device, non_blocking=True), size, is_aligned=is_aligned)
            event = torch.cuda.Event()
            event.record(self._stream)
        return lambda: bool(event.query())

    def _warm_up(self) -> None:
        """Compiles and loads kernels now: a transfer that waited for that would be late, and so would the renewal of
        leases.
        """
        from mini_infer_engine.kernels.copy_pieces import warm_up

        with self._torch.cuda.stream(self._stream):
            warm_up(self._device)
        self._stream.synchronize()
