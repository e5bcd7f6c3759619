"""The memory of the tier below a device's pool: pages, one after another, of its own or shared. Subclasses copy.

A codec says what a page becomes on its way; checkpoints of recurrent state are copied as they are, to as many pages as
they take. Digests are made of the bytes that leave the device, before a store and after a load. Copies of each
direction run beside those of the other one, so that no load waits for what is written behind.
"""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseHostMemory, LayerwiseLoad, Moved, PageMove, StateMove
from mini_infer_engine.kv_host.pool_file import PoolFile
from mini_infer_engine.runtime.memory.page_codec import WORD_BYTES, PageCodec
from mini_infer_engine.runtime.memory.page_digests import PageDigests


class HostTier(ABC):
    """The memory of the tier. Subclasses copy."""

    latency_s: float
    bytes_per_s: float
    least_load_s: float
    """Seconds of a load from which a pass that follows it saves more than that costs."""
    follows_passes = False
    """True if loads of pages wait for the passes launched so far, which may still read what is behind their windows."""
    num_layers = 0
    """Layers of a page, one after another, by which pages can be loaded; 0 if they are loaded whole."""
    places: Sequence[int] = ()
    """The place of each layer of the model among those of its KV group's pages; empty if there is one group. Pages of
    all groups are loaded together, one place after another.
    """

    def __init__(
        self,
        codec: PageCodec,
        num_pages: int,
        identity: bytes,
        shared: PoolFile | None = None,
        states: Tensor | None = None,  # [checkpoints, words] int64
        pages_per_state: int = 0,
    ) -> None:
        """Allocates main memory for `num_pages` pages of the codec's form, or takes that of a `shared` pool. Own memory
        is taken as it is written to, on a GPU at once. Each row of `states` takes `pages_per_state` pages.
        """
        self._states, self.pages_per_state = states, pages_per_state
        self._state_digests = None if states is None else PageDigests([states])
        self.num_pages, self.identity, self.shared = num_pages, identity, shared
        widths = [part.shape[1] for part in codec.parts]
        self.page_bytes = sum(widths) * WORD_BYTES
        if shared is not None:
            self.identity, self.memory = shared.layout.identity.encode(), shared.pages
        else:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory would have no huge pages
            self.memory = memoryview(mmap.mmap(-1, max(1, num_pages) * self.page_bytes, flags=private))
        """The pages, one after another. It begins at a page of the operating system, as direct I/O needs it."""
        self.words = np.frombuffer(self.memory, np.uint64).reshape(-1, sum(widths))
        starts = [sum(widths[:index]) for index in range(len(widths))]
        self.columns = [slice(start, start + width) for start, width in zip(starts, widths, strict=True)]
        """The columns of each part in a page of main memory."""
        self._open(codec)

    @abstractmethod
    def _open(self, codec: PageCodec) -> None:
        """Prepares copies to the memory, which is there."""

    @property
    def layerwise(self) -> LayerwiseHostMemory | None:
        """The tier itself, if its pages have their layers one after another."""
        return self if self.num_layers else None

    @property
    def layers_to_capture(self) -> LayerwiseLoad | None:
        """The load that stands for all later ones where a pass is captured; None on a CPU."""
        return None

    @abstractmethod
    def load_layerwise(self, ticket: int, moves: Sequence[PageMove]) -> LayerwiseLoad:
        """Copies pages of main memory to the device, the first layer of all pages first. The pass that follows the
        copy does not wait for the digests, which are made of what it reads.
        """

    @abstractmethod
    def store(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of the device to main memory."""

    @abstractmethod
    def load(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of main memory to the device."""

    @abstractmethod
    def take(self) -> list[Moved]:
        """Returns the copies that have ended since the last call, without waiting."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Waits until a copy has ended, at most so long. Returns at once if nothing is being copied."""

    def page_memory(self, page: int) -> memoryview:
        """Returns the bytes of a page, for files."""
        return self.memory[page * self.page_bytes : (page + 1) * self.page_bytes]

    def _pieces_of(self, state: StateMove) -> Iterator[tuple[Tensor, slice]]:
        """Yields the pieces of a state on the device [words], each with its words among all of main memory."""
        assert self._states is not None, "this model has no recurrent state"
        row, width = self._states[state.checkpoint], self.words.shape[1]
        for place, first, count in runs(state.pages):
            piece = row[place * width : (place + count) * width]  # the last page may have room left
            yield piece, slice(first * width, first * width + len(piece))


def runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields runs of consecutive pages: the place of the first, that page, and their number."""
    begin = 0
    for place in range(1, len(pages) + 1):
        if place == len(pages) or pages[place] != pages[place - 1] + 1:
            yield begin, pages[begin], place - begin
            begin = place
