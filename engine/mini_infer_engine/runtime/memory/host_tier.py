"""Implements `HostMemory`: pages of main memory below a device's pool, and copies between both beside the passes.

On a CPU threads copy. On a GPU memory is pinned, and copies run on streams of their own. There is one for each
direction, so that no load waits for what is written behind. A codec says what a page becomes on its way; checkpoints of
recurrent state are copied as they are, to as many pages as they take. Digests are made of the bytes that leave the
device, before a store and after a load.
"""

import mmap
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseHostMemory, LayerwiseLoad, Moved, PageMove, StateMove
from mini_infer_engine.kv_host.pool_file import PoolFile
from mini_infer_engine.kv_transfer.token_digests import MODULUS
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.layerwise_load import CopiedLayers, copy_layers
from mini_infer_engine.runtime.memory.page_codec import WORD_BYTES, PageCodec, RawPages, make_codec
from mini_infer_engine.runtime.memory.page_digests import PageDigests

OpenSharedPool = Callable[..., PoolFile]
"""Opens memory that several engines share, for pages of so many bytes and a layout of this name. `load_runner` adds the
keywords `page_tokens` and `device`.
"""
_BUFFERS = 2
"""Batches of pages that a codec has rows for."""
_LEAST_FOLLOWED_S = 0.002
"""Seconds of a load of which less is saved than the threads of load and pass cost each other: with 1.2 ms a hit came
2 % later, with 3 ms 5 % sooner (benchmarks/results/2026-11-29-kv-loads-by-layer.md).
"""
_CPU_BYTES_PER_S, _GPU_BYTES_PER_S = 2e9, 40e9
"""First estimates of the speed of copies: a core that copies and hashes; pinned memory over PCIe 5."""


class HostTier(ABC):
    """The memory of the tier. Subclasses copy."""

    latency_s = 0.0005
    bytes_per_s = _CPU_BYTES_PER_S
    follows_passes = False
    """True if loads of pages wait for the passes launched so far, which may still read what is behind their windows."""
    num_layers = 0
    """Layers of a page, one after another, by which pages can be loaded; 0 if they are loaded whole."""

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

    @property
    def layerwise(self) -> LayerwiseHostMemory | None:
        """None: pages come whole."""
        return None

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


class CpuHostTier(HostTier):
    """A tier below a pool in main memory."""

    least_load_s = _LEAST_FOLLOWED_S

    def __init__(
        self,
        codec: PageCodec,
        num_pages: int,
        identity: bytes,
        shared: PoolFile | None = None,
        states: Tensor | None = None,
        pages_per_state: int = 0,
    ) -> None:
        super().__init__(codec, num_pages, identity, shared, states, pages_per_state)
        self._flat = self.words.reshape(-1)
        self._storing, self._loading = _Direction(codec), _Direction(codec.for_another_stream())
        self._ended: deque[Moved] = deque()
        self._num_under_way = 0
        self._changed = Condition()

    def store(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of the device to main memory."""
        self._request(self._storing, ticket, lambda: [*map(self._store, moves), *map(self._store_state, states)])

    def load(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of main memory to the device."""
        self._request(self._loading, ticket, lambda: [*map(self._load, moves), *map(self._load_state, states)])

    @property
    def layerwise(self) -> LayerwiseHostMemory | None:
        """The tier itself, if its pages have their layers one after another."""
        return self if self.num_layers else None

    def load_layerwise(self, ticket: int, moves: Sequence[PageMove]) -> LayerwiseLoad:
        """Copies pages of main memory to the device, the first layer of all pages first. The pass that follows the
        copy does not wait for the digests, which are made of what it reads.
        """
        layers, (part,) = CopiedLayers(), self._loading.parts

        def copy() -> list[int]:
            try:
                copy_layers(self.words, part, moves, self.num_layers, layers)
            finally:
                layers.end()
            return self._loading.digests_of([move.target for move in moves])

        self._request(self._loading, ticket, copy)
        return layers

    def _store(self, move: PageMove) -> int:
        way = self._storing
        (row,) = rows = way.codec.rows_of([move.source])
        way.codec.encode([move.source], rows)
        (digest,) = way.digests_of(rows)
        for part, columns in zip(way.parts, self.columns, strict=True):
            np.copyto(self.words[move.target, columns], part[row])
        return digest

    def _load(self, move: PageMove) -> int:
        way = self._loading
        (row,) = rows = way.codec.rows_of([move.target])
        for part, columns in zip(way.parts, self.columns, strict=True):
            np.copyto(part[row], self.words[move.source, columns])
        (digest,) = way.digests_of(rows)
        way.codec.decode([move.target], rows)
        return digest

    def _store_state(self, state: StateMove) -> int:
        digest = self._digest_of_state(state)
        for piece, words in self._pieces_of(state):
            np.copyto(self._flat[words], piece.numpy().view(np.uint64))
        return digest

    def _load_state(self, state: StateMove) -> int:
        for piece, words in self._pieces_of(state):
            np.copyto(piece.numpy().view(np.uint64), self._flat[words])
        return self._digest_of_state(state)

    def _digest_of_state(self, state: StateMove) -> int:
        assert self._state_digests is not None, "this model has no recurrent state"
        return int(self._state_digests.of([state.checkpoint])) % MODULUS

    def _request(self, way: "_Direction", ticket: int, copy: Callable[[], list[int]]) -> None:
        begin_s = time.perf_counter()

        def run() -> None:
            try:
                with torch.inference_mode():
                    digests, error = copy(), ""
            except Exception as fault:  # it must reach the engine, which turns the tier off
                digests, error = [], f"{type(fault).__name__}: {fault}"
            moved = Moved(ticket, time.perf_counter() - begin_s, digests, error)
            with self._changed:
                self._ended.append(moved)
                self._num_under_way -= 1
                self._changed.notify_all()

        with self._changed:
            self._num_under_way += 1
        way.requests.put(run)

    def take(self) -> list[Moved]:
        """Returns the copies that have ended since the last call, without waiting."""
        with self._changed:
            ended = list(self._ended)
            self._ended.clear()
        return ended

    def wait(self, timeout_s: float) -> None:
        """Waits until a copy has ended, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._num_under_way, timeout_s)


class _Direction:
    """A thread that copies one way, with a codec of its own."""

    def __init__(self, codec: PageCodec) -> None:
        self.codec = codec
        self.parts = [part.numpy().view(np.uint64) for part in codec.parts]
        self.requests: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._digests = PageDigests(codec.parts)
        Thread(target=self._run, name="kv-host-tier", daemon=True).start()

    def digests_of(self, rows: Sequence[int]) -> list[int]:
        """Returns the digests of these rows."""
        return [digest % MODULUS for digest in self._digests.of(rows).tolist()]

    def _run(self) -> None:
        while True:
            self.requests.get()()


@dataclass(slots=True, eq=False)
class _Copy:
    ticket: int
    digests: Tensor  # [pages] int64, pinned
    begin: Any
    end: Any
    """Events around the copies; torch leaves their methods untyped."""


class CudaHostTier(HostTier):
    """A tier below a pool on a GPU."""

    latency_s = 0.0002
    bytes_per_s = _GPU_BYTES_PER_S

    def __init__(
        self,
        codec: PageCodec,
        num_pages: int,
        identity: bytes,
        shared: PoolFile | None = None,
        states: Tensor | None = None,
        pages_per_state: int = 0,
    ) -> None:
        super().__init__(codec, num_pages, identity, shared, states, pages_per_state)
        self._storing_codec, self._loading_codec = codec, codec.for_another_stream()
        self._device = codec.parts[0].device
        self._host = torch.from_numpy(self.words.view(np.int64))
        _pin(self._host, self._device)
        # Otherwise the next engine of this process could get the same addresses, which CUDA would think are locked.
        weakref.finalize(self, _unpin, self._host, self._device).atexit = False
        self._storing: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
        self._loading: Any = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._packing: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._unpacking: Any = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._copies: deque[_Copy] = deque()
        self._digests = {each: PageDigests(each.parts) for each in (self._storing_codec, self._loading_codec)}

    def store(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages and states of the GPU to main memory, after all passes launched so far."""
        codec, digests = self._storing_codec, []
        with torch.inference_mode(), torch.cuda.device(self._device):
            self._storing.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._storing):
                begin = _event()
                begin.record()
                turns = _Turns(self._packing if len(moves) > codec.most_pages else self._storing, self._storing)
                for some in _batches(moves, codec.most_pages):
                    pages = [move.source for move in some]
                    rows = codec.rows_of(pages)
                    with turns.first():
                        codec.encode(pages, rows)
                        digests.append(self._digests[codec].of(rows))
                    with turns.second():
                        for row, move in zip(rows, some, strict=True):
                            for part, columns in zip(codec.parts, self.columns, strict=True):
                                self._host[move.target, columns].copy_(part[row], non_blocking=True)
                digests += self._digests_of_states(states)
                for state in states:
                    for piece, words in self._pieces_of(state):
                        self._host.view(-1)[words].copy_(piece, non_blocking=True)
                self._end(ticket, digests, begin)

    def load(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        """Copies pages of main memory to the GPU, beside the passes that run, and states after those launched so far:
        they may still read and write what was in the slot.
        """
        codec, digests, passes = self._loading_codec, [], torch.cuda.current_stream(self._device)
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._loading):
            if self.follows_passes:
                self._loading.wait_stream(passes)
            begin = _event()
            begin.record()
            turns = _Turns(self._loading, self._unpacking if len(moves) > codec.most_pages else self._loading)
            for some in _batches(moves, codec.most_pages):
                pages = [move.target for move in some]
                rows = codec.rows_of(pages)
                with turns.first():
                    for row, move in zip(rows, some, strict=True):
                        for part, columns in zip(codec.parts, self.columns, strict=True):
                            part[row].copy_(self._host[move.source, columns], non_blocking=True)
                with turns.second():
                    digests.append(self._digests[codec].of(rows))
                    codec.decode(pages, rows)
            turns.end()
            if states:
                self._loading.wait_stream(passes)
            for state in states:
                for piece, words in self._pieces_of(state):
                    piece.copy_(self._host.view(-1)[words], non_blocking=True)
            digests += self._digests_of_states(states)
            self._end(ticket, digests, begin)

    def _digests_of_states(self, states: Sequence[StateMove]) -> list[Tensor]:
        if not states or self._state_digests is None:
            return []
        return [self._state_digests.of([state.checkpoint for state in states])]

    def _end(self, ticket: int, digests: list[Tensor], begin: Any) -> None:
        found = torch.cat(digests)
        read = torch.empty(found.shape, dtype=torch.int64, pin_memory=True)
        read.copy_(found, non_blocking=True)
        end = _event()
        end.record()
        self._copies.append(_Copy(ticket, read, begin, end))

    def take(self) -> list[Moved]:
        """Returns the copies that have ended since the last call, without waiting."""
        ended = [copy for copy in self._copies if copy.end.query()]
        for copy in ended:
            self._copies.remove(copy)
        return [
            Moved(
                copy.ticket,
                copy.begin.elapsed_time(copy.end) / 1000,
                [digest % MODULUS for digest in copy.digests.tolist()],
            )
            for copy in ended
        ]

    def wait(self, timeout_s: float) -> None:
        """Waits until a copy has ended, at most so long."""
        end_s = time.perf_counter() + timeout_s
        while self._copies and time.perf_counter() < end_s:
            if any(copy.end.query() for copy in self._copies):
                return


class _Turns:
    """Two streams that share two buffers: the second works on a batch when the first has, which goes on with the next
    one, and takes a buffer again when the second has left it. They may be one and the same.
    """

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second, self._is_one = first, second, first is second
        self._left: deque[Any] = deque()
        if not self._is_one:
            first.wait_stream(second)

    @contextmanager
    def first(self) -> Iterator[None]:
        """Inside, work goes to the first stream, for the next batch."""
        if self._is_one:
            yield
            return
        if len(self._left) == _BUFFERS:
            self._first.wait_event(self._left.popleft())
        with torch.cuda.stream(self._first):
            yield
        self._second.wait_stream(self._first)

    @contextmanager
    def second(self) -> Iterator[None]:
        """Inside, work goes to the second stream, for the same batch."""
        if self._is_one:
            yield
            return
        with torch.cuda.stream(self._second):
            yield
        self._left.append(self._second.record_event())

    def end(self) -> None:
        """Has the first stream wait for the second one."""
        if not self._is_one:
            self._first.wait_stream(self._second)


def _batches(moves: Sequence[PageMove], size: int) -> Iterator[Sequence[PageMove]]:
    return (moves[first : first + size] for first in range(0, len(moves), size))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


def _pin(tensor: Tensor, device: torch.device) -> None:
    """Page-locks memory that torch has not allocated: its own pinned memory comes in powers of two."""
    with torch.cuda.device(device):
        result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(result):
        raise ModelError(
            f"kv_host_memory: CUDA cannot page-lock {tensor.nbytes:,} bytes (error {int(result)}): set a smaller one, "
            "or raise the limit of locked memory."
        )


def _unpin(tensor: Tensor, device: torch.device) -> None:
    """Gives page-locked memory back, once no copy uses it."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]  # torch's


def make_host_tier(
    pool: KVPool,
    num_bytes: int,
    identity: bytes,
    dtype: str = "auto",
    open_shared: OpenSharedPool | None = None,
    smallest: Callable[[int], int] = int,
) -> HostTier | None:
    """Returns the tier of a pool with as many pages as fit in `num_bytes`, in the form that `dtype` of
    --kv-tier-dtype says; None if there are to be none. It is in memory that other engines share if `open_shared` opens
    that. `smallest` returns the smallest number of all ranks.

    Raises ModelError if not a single page fits, or no page and state.
    """
    if not num_bytes:
        return None
    codec = make_codec(pool, dtype)
    page_bytes = sum(part.shape[1] for part in codec.parts) * WORD_BYTES
    if num_bytes < page_bytes:
        raise ModelError(f"kv_host_memory = {num_bytes:,} bytes: one page takes {page_bytes:,}: set a larger one.")
    kind = CudaHostTier if pool.storage.device.type == "cuda" else CpuHostTier
    identity += codec.name.encode()
    states = None if pool.states is None or not pool.states.slots.num_checkpoints else pool.states.checkpoint_words()
    pages_per_state = 0 if states is None else -smallest(-pages_of(states.shape[1] * WORD_BYTES, page_bytes))
    least = (1 + pages_per_state) * page_bytes
    if num_bytes < least:
        raise ModelError(
            f"kv_host_memory = {num_bytes:,} bytes: a page and a recurrent state take {least:,}: set a larger one."
        )
    if open_shared is not None:
        shared = open_shared(page_bytes, identity)
        tier: HostTier = kind(codec, shared.layout.num_slots, identity, shared, states, pages_per_state)
    else:
        tier = kind(codec, smallest(num_bytes // page_bytes), identity, None, states, pages_per_state)
    tier.num_layers = _layers_to_load(pool, codec)
    return tier


def _layers_to_load(pool: KVPool, codec: PageCodec) -> int:
    """Returns the layers of a pool's pages if each is there once the words of that layer are; otherwise 0."""
    spec = pool.spec
    if not isinstance(codec, RawPages) or len(codec.parts) != 1 or not pool.kv_cache.is_uniform or spec.head_shapes:
        return 0
    return 0 if codec.parts[0].shape[1] % spec.num_layers else spec.num_layers


def pages_of(state_bytes: int, page_bytes: int) -> int:
    """Returns the pages of main memory that a state takes."""
    return -(-state_bytes // page_bytes)
