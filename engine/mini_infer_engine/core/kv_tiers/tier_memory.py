"""Defines the interfaces of the tiers' memory: asynchronous copies of whole pages, each with a digest. No decisions.

A copy is identified by a ticket that its caller chooses; `take` returns it once the copy has ended.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mini_infer_engine.core.kv_tiers.page_record import PageRecord


class PageMove(NamedTuple):
    """Instruction to copy a whole page, in all layers, to a page of another medium."""

    source: int
    target: int


class StateMove(NamedTuple):
    """Instruction to copy a checkpoint of recurrent state, in all layers, to or from pages of main memory."""

    checkpoint: int
    pages: tuple[int, ...]
    """The pages of main memory with its parts, in order."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Event: the copies of one ticket have ended."""

    ticket: int
    seconds: float
    """Seconds from the request to the end of its last copy."""
    digests: Sequence[int] = ()
    """The digest of each page's bytes, and then of each state's, as the device has them: before a store, after a load.
    """
    error: str = ""
    """The reason why the copies failed; empty if they have not."""


class LayerwiseLoad(Protocol):
    """Copies from main memory that a pass follows layer by layer, in place of waiting for their end."""

    def wait_for_layer(self, layer: int) -> None:
        """Has the pass wait until this layer of all pages is on the device.

        Never raises: if the copies fail, the pass goes on with whatever is there, and `HostMemory.take` returns the
        error.
        """


class LayerwiseHostMemory(Protocol):
    """Main memory from which a pass may read pages while they are still being copied."""

    least_load_s: float
    """Seconds of a load from which to follow it saves more than it costs."""

    def load_layerwise(self, ticket: int, moves: Sequence[PageMove]) -> LayerwiseLoad:
        """Copies pages of main memory to the device as `HostMemory.load` does, the first layer of all pages first."""


class HostMemory(Protocol):
    """Pages of main memory beside a device's pool. Copies run beside passes, those of each direction in the order of
    their requests.
    """

    num_pages: int
    page_bytes: int
    """Bytes of a page in all layers."""
    pages_per_state: int
    """Pages that a checkpoint of recurrent state takes; 0 if there are none."""
    identity: bytes
    """Names everything that decides what a page's bytes mean besides its tokens: dtype, layout, kernels."""
    latency_s: float
    bytes_per_s: float
    """Estimated latency and speed of copies, until some are measured."""

    @property
    def layerwise(self) -> LayerwiseHostMemory | None:
        """The memory itself, if passes can follow its copies layer by layer; None if pages are loaded before a pass."""

    def store(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of the device to main memory. What is written to meanwhile is stored in part."""

    def load(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of main memory to the device. No launched pass may use the pages; states are copied
        after all passes launched so far, and no later one may use them before `take` returns the ticket.
        """

    def take(self) -> list[Moved]:
        """Returns the copies that have ended since the last call, without waiting."""

    def wait(self, timeout_s: float) -> None:
        """Waits until `take` has something to return, at most so long. Returns at once if nothing is being copied."""

    def page_memory(self, page: int) -> memoryview:
        """Returns the bytes of a page, for files."""


@dataclass(frozen=True, slots=True)
class DiskMoved:
    """Event: a page has been written to the disk or read from it."""

    ticket: int
    seconds: float
    location: int = -1
    """The location of a page that was written, for `read`."""
    is_gone: bool = False
    """True if nothing was read because the page's file has been dropped, or written because no page can have such a
    record.
    """
    error: str = ""
    """The reason why nothing was written or read by a fault of the disk; empty if there was none."""


@dataclass(frozen=True, slots=True)
class DiskPage:
    """A page on the disk."""

    record: PageRecord
    location: int


class DiskMemory(Protocol):
    """Pages in files, between which and main memory they are copied. Files are dropped whole, the oldest first."""

    capacity_bytes: int
    latency_s: float
    bytes_per_s: float
    """Estimated latency and speed of reads, until some are measured."""
    fault: str
    """The reason why nothing can be written or read from the start on; empty if there is none."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all files."""

    def take_recovered(self) -> list[DiskPage]:
        """Returns the pages that a former process has written, as far as they have been found since the last call."""

    def write(self, ticket: int, host_page: int, record: PageRecord) -> None:
        """Writes a page of main memory, which must not change before `take` returns the ticket."""

    def read(self, ticket: int, location: int, host_page: int) -> None:
        """Reads a page into main memory."""

    def take(self) -> list[DiskMoved]:
        """Returns the writes and reads that have ended since the last call, without waiting."""

    def take_dropped(self) -> list[int]:
        """Returns the locations whose files were dropped since the last call."""

    def wait(self, timeout_s: float) -> None:
        """Waits until `take` has something to return, at most so long. Returns at once if nothing is being copied."""

    def clear(self) -> None:
        """Drops all files."""


def sealed(digest: int, key: bytes, identity: bytes) -> int:
    """Returns the digest of a page's bytes combined with the key of its tokens and the identity of its memory, so that
    the right bytes in the wrong place do not match either.
    """
    content = digest.to_bytes(8, "little") + len(key).to_bytes(2, "little") + key + identity
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
