"""Memory that other processes of this host can map: what `MappedTransport` asks of it, and how peers are told of it."""

from collections.abc import Callable
from typing import Annotated, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from mini_infer_engine.kv_transfer.topology.peer_process import ProcessName

Kind = Literal["cuda-ipc", "shm"]
"""As in --kv-transport."""
IsDone = Callable[[], bool]
"""Whether copies have ended; any thread may ask."""


class SharedPool(msgspec.Struct, frozen=True, kw_only=True):
    """How another process maps a page pool. What a handle opens may be more than the pool."""

    kind: Kind
    process: ProcessName
    handle: Annotated[bytes, Meta(max_length=4096)]
    size: Annotated[int, Meta(ge=0, lt=1 << 53)]
    """Bytes of what the handle opens."""
    offset: Annotated[int, Meta(ge=0, lt=1 << 53)]
    """Of the pool in it."""
    pool_bytes: Annotated[int, Meta(ge=0, lt=1 << 53)]


class Mapping(Protocol):
    """A peer's pool in this process. It stays there when the peer's process has ended, until it is closed."""

    address: int
    """Of the pool."""

    def close(self) -> None:
        """Nothing is copied from or to it any more."""


class MappedMemory(Protocol):
    """One kind of memory, over one pool of this process."""

    shared: SharedPool

    def enter_thread(self) -> None:
        """See `Transport.enter_thread`."""

    def open(self, pool: SharedPool) -> Mapping:
        """Map another process's pool. TransportError: it cannot be reached."""

    def copy(self, pieces: np.ndarray, size: int) -> IsDone:  # pieces [pieces, 2] int64
        """Begin to copy `size` bytes from an address of this process to another, for each piece."""
