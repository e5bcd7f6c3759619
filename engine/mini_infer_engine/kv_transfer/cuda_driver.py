"""CUDA's driver API by ctypes: mapping allocations of other processes, and whatever else is called by name."""

import ctypes
from typing import Any, Protocol

_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""
HANDLE_BYTES = 64
"""Length of a CUDA IPC memory handle (CU_IPC_HANDLE_SIZE)."""


class CudaError(RuntimeError):
    """The driver refuses."""


class IpcDriver(Protocol):
    """What is asked of CUDA's driver; in the thread's current context."""

    def range_of(self, address: int) -> tuple[int, int]:
        """Address and bytes of the allocation that an address is in."""

    def handle_of(self, address: int) -> bytes:
        """Of an allocation, for other processes. CudaError."""

    def open(self, handle: bytes) -> int:
        """Map another process's allocation: its address here. CudaError."""

    def close(self, address: int) -> None:
        """Unmap it. CudaError."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """See `IpcDriver`, and the chapter "Memory Management" of CUDA's driver API."""

    def __init__(self) -> None:
        """OSError: there is no driver."""
        self._library = ctypes.CDLL("libcuda.so.1")

    def range_of(self, address: int) -> tuple[int, int]:
        """See `IpcDriver.range_of`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def handle_of(self, address: int) -> bytes:
        """See `IpcDriver.handle_of`."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """See `IpcDriver.open`."""
        address = ctypes.c_uint64()
        self.call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        return address.value

    def close(self, address: int) -> None:
        """See `IpcDriver.close`."""
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def call(self, function: str, *arguments: Any) -> None:
        """Any of its functions. CudaError: what it returns but for success."""
        status = getattr(self._library, function)(*arguments)
        if status:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(name))
            raise CudaError(f"{function}: {(name.value or b'').decode() or status}")
