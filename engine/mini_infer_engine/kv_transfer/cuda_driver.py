"""Binds CUDA's driver API by ctypes: maps allocations of other processes, and calls any other function by name."""

import ctypes
from typing import Any, Protocol

_LAZY_PEER_ACCESS = 1
"""Value of CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""
HANDLE_BYTES = 64
"""Length of a CUDA IPC memory handle (CU_IPC_HANDLE_SIZE)."""


class CudaError(RuntimeError):
    """A call of the driver has failed."""


class Driver(Protocol):
    """CUDA's driver, in the thread's current context."""

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function by name. Raises CudaError with the status if it is not success."""


class IpcDriver(Protocol):
    """The functions of CUDA's driver for memory that processes share. All use the thread's current context."""

    def range_of(self, address: int) -> tuple[int, int]:
        """Returns the address and bytes of the allocation that contains an address."""

    def handle_of(self, address: int) -> bytes:
        """Returns the IPC handle of an allocation, for other processes. Raises CudaError if it has none."""

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation, and returns its address here. Raises CudaError if that fails."""

    def close(self, address: int) -> None:
        """Unmaps an allocation. Raises CudaError if that fails."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """Implements `IpcDriver` by libcuda: see the chapter "Memory Management" of CUDA's driver API."""

    def __init__(self) -> None:
        """Loads the library. Raises OSError if there is no driver."""
        self._library = ctypes.CDLL("libcuda.so.1")

    def range_of(self, address: int) -> tuple[int, int]:
        """Calls cuMemGetAddressRange."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def handle_of(self, address: int) -> bytes:
        """Calls cuIpcGetMemHandle."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """Calls cuIpcOpenMemHandle, with lazy peer access."""
        address = ctypes.c_uint64()
        self.call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        return address.value

    def close(self, address: int) -> None:
        """Calls cuIpcCloseMemHandle."""
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def call(self, function: str, *arguments: Any) -> None:
        """Calls a function of the driver by name. Raises CudaError with the status if it is not success, and if the
        driver is too old to have it.
        """
        if not hasattr(self._library, function):
            raise CudaError(f"{function}: this driver lacks it")
        status = getattr(self._library, function)(*arguments)
        if status:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(name))
            raise CudaError(f"{function}: {(name.value or b'').decode() or status}")
