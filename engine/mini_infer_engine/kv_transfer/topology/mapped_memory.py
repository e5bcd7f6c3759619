"""Defines memory that other processes of this host can map: the interface for `MappedTransport`, and its description
for peers.
"""

from collections.abc import Callable
from typing import Annotated, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from mini_infer_engine.kv_transfer.topology.peer_process import ProcessName

Kind = Literal["cuda-ipc", "shm"]
"""Kinds of memory, named as by --kv-transport."""
IsDone = Callable[[], bool]
"""A function that returns True once the copies have ended. Any thread may call it."""


class SharedPool(msgspec.Struct, frozen=True, kw_only=True):
    """The handle by which another process maps a page pool. It may open more memory than the pool."""

    kind: Kind
    process: ProcessName
    handle: Annotated[bytes, Meta(max_length=4096)]
    size: Annotated[int, Meta(ge=0, lt=1 << 53)]
    """Bytes of the memory that the handle opens."""
    offset: Annotated[int, Meta(ge=0, lt=1 << 53)]
    """Offset of the pool in that memory, in bytes."""
    pool_bytes: Annotated[int, Meta(ge=0, lt=1 << 53)]


class Mapping(Protocol):
    """A peer's pool, mapped into this process. It stays mapped after the peer's process has ended until closed."""

    address: int
    """Address of the pool in this process."""

    def close(self) -> None:
        """Unmaps the pool. No copy from or to it may be in flight."""


class MappedMemory(Protocol):
    """Mappable memory of one kind, for one pool of this process."""

    shared: SharedPool

    def enter_thread(self) -> None:
        """Prepares the calling thread, which alone copies from then on."""

    def open(self, pool: SharedPool) -> Mapping:
        """Maps another process's pool. Raises TransportError if it cannot be reached."""

    def copy(self, pieces: np.ndarray, size: int) -> IsDone:  # pieces [pieces, 2] int64
        """Begins to copy `size` bytes for each piece, from an address of this process to another."""
