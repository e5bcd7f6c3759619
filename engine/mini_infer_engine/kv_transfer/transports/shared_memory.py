"""Shares page pools in main memory with other processes of this host: anonymous memory that they open through /proc.

The memory is freed when the last process that has mapped it ends, however it ends; nothing is left in /dev/shm.
Processes that may debug the owner (those of the same user) may open it.
"""

import ctypes
import fcntl
import mmap
import os
import secrets

import numpy as np

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVMemory
from mini_infer_engine.kv_transfer.topology.mapped_memory import IsDone, SharedPool
from mini_infer_engine.kv_transfer.topology.peer_process import this_process
from mini_infer_engine.kv_transfer.transport import TransportError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Seals of the memory's file: nobody can shorten it while other processes have mapped it."""


class SharedArray:
    """A zeroed array that other processes can map for as long as this process lives."""

    def __init__(self, num_bytes: int) -> None:
        self.file = os.memfd_create(f"kv-{secrets.token_hex(16)}", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self.file, num_bytes)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
        self.bytes: np.ndarray = np.frombuffer(mmap.mmap(self.file, num_bytes), np.uint8)


class _HostMapping:
    def __init__(self, file: int, pool: SharedPool) -> None:
        self._memory = mmap.mmap(file, pool.size)
        self._bytes = ctypes.c_uint8.from_buffer(self._memory)
        self.address = ctypes.addressof(self._bytes) + pool.offset

    def close(self) -> None:
        """Unmaps the memory."""
        del self._bytes
        self._memory.close()


class HostMemory:
    """Implements `MappedMemory` in main memory. Each copy has ended when the call returns."""

    def __init__(self, memory: KVMemory) -> None:
        """Shares the pool. Raises ModelError if it is not in a `SharedArray`."""
        if memory.device != "cpu" or memory.file is None:
            raise ModelError("--kv-transport shm moves pages in main memory: on GPUs choose cuda-ipc, nixl or auto")
        name = os.readlink(f"/proc/self/fd/{memory.file}")
        self.shared = SharedPool(
            kind="shm",
            process=this_process(),
            handle=f"{memory.file} {name}".encode(),
            size=os.fstat(memory.file).st_size,
            offset=0,
            pool_bytes=memory.size,
        )

    def enter_thread(self) -> None:
        """Does nothing: main memory needs no preparation."""

    def open(self, pool: SharedPool) -> _HostMapping:
        """Maps the owner's file through /proc. Raises TransportError if it cannot be opened, or is not the memory
        described.
        """
        number, _, name = pool.handle.decode(errors="replace").partition(" ")
        if not number.isdecimal():
            raise TransportError("that is no handle of shared memory")
        path = f"/proc/{pool.process.pid}/fd/{number}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"its pages cannot be opened ({error}): run both engines as the same user") from None
        try:
            is_it = os.readlink(f"/proc/self/fd/{file}") == name and os.fstat(file).st_size == pool.size
            if not is_it or fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise TransportError(f"{path} is not the memory that the other engine describes")
            return _HostMapping(file, pool)
        except OSError as error:
            raise TransportError(f"its pages cannot be mapped: {error}") from None
        finally:
            os.close(file)

    def copy(self, pieces: np.ndarray, size: int) -> IsDone:  # pieces [pieces, 2] int64
        """Copies all pieces, synchronously."""
        for source, target in pieces.tolist():
            ctypes.memmove(target, source, size)
        return lambda: True
