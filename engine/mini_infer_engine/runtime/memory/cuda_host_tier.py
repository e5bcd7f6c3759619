"""Implements `HostMemory` below a pool on a GPU: memory is pinned, and copies run on a stream for each direction."""

import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseLoad, Moved, PageMove, StateMove
from mini_infer_engine.kv_transfer.cuda_driver import CudaDriver
from mini_infer_engine.kv_transfer.token_digests import MODULUS
from mini_infer_engine.runtime.memory.host_tier import HostTier
from mini_infer_engine.runtime.memory.loaded_layers import LoadedLayers
from mini_infer_engine.runtime.memory.page_codec import WORD_BYTES, PageCodec
from mini_infer_engine.runtime.memory.page_digests import PageDigests
from mini_infer_engine.runtime.memory.piece_copies import PieceCopies, Pieces

_BUFFERS = 2
"""Batches of pages that a codec has rows for."""
_LEAST_FOLLOWED_S = 0.0003
"""Seconds of a load of which less is saved than it costs the host to copy it in several pieces."""


@dataclass(slots=True, eq=False)
class _Copy:
    ticket: int
    digests: Tensor  # [pages] int64, pinned
    begin: Any
    copied: Any
    """Events around the copies; torch leaves their methods untyped."""
    end: Any
    """The event after which the digests can be read."""


class CudaHostTier(HostTier):
    """A tier below a pool on a GPU."""

    latency_s = 0.0002
    bytes_per_s = 40e9  # a first estimate: pinned memory over PCIe 5
    least_load_s = _LEAST_FOLLOWED_S

    def _open(self, codec: PageCodec) -> None:
        self._storing_codec, self._loading_codec = codec, codec.for_another_stream()
        self._device = codec.parts[0].device
        self._host = torch.from_numpy(self.words.view(np.int64))
        _pin(self._host, self._device)
        # Otherwise the next engine of this process could get the same addresses, which CUDA would think are locked.
        weakref.finalize(self, _unpin, self._host, self._device).atexit = False
        self._storing: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
        self._loading: Any = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]  # torch's
        self._packing: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
        self._unpacking: Any = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]  # torch's
        self._pieces = PieceCopies(CudaDriver())
        self._copies: deque[_Copy] = deque()
        self._unproved: deque[tuple[int, list[int], Any, Any]] = deque()
        """The ticket of each load whose digests are not requested yet, its pages, and the events around its copies."""
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
                        pieces = self._pieces_at(codec, rows, [move.target for move in some])
                        self._pieces.to_host(pieces, self._storing.cuda_stream)
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
                    pieces = self._pieces_at(codec, rows, [move.source for move in some])
                    self._pieces.to_device(pieces, self._loading.cuda_stream)
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

    def load_layerwise(self, ticket: int, moves: Sequence[PageMove]) -> LayerwiseLoad:
        """Copies pages of main memory to the GPU, the first layers of all pages first. The digests are requested once
        the pass has been launched, which would wait for the host meanwhile.
        """
        layers, pages = self._layers, [move.target for move in moves]
        if self.follows_passes:
            # The host waits, not the stream: a graph in flight may wait for the events that are recorded anew below,
            # and would wait for this load, which waited for it.
            torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.device(self._device), torch.cuda.stream(self._loading):
            begin, copied = _event(), _event()
            begin.record()
            whole = self._pieces_at(self._loading_codec, pages, [move.source for move in moves])
            for group, (first, last) in enumerate(layers.groups):
                self._pieces.to_device(whole.part(first, last, self.num_layers), self._loading.cuda_stream)
                layers.copied(group)
            copied.record()
        self._unproved.append((ticket, pages, begin, copied))
        return layers

    def _prove(self) -> None:
        """Requests the digests of what has been loaded layer by layer since the last call."""
        if not self._unproved:
            return
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._loading):
            while self._unproved:
                ticket, pages, begin, copied = self._unproved.popleft()
                self._end(ticket, [self._digests[self._loading_codec].of(pages)], begin, copied)

    @property
    def layers_to_capture(self) -> LayerwiseLoad | None:
        """The events that each load records."""
        return self._layers if self.num_layers else None

    @cached_property
    def _layers(self) -> LoadedLayers:
        with torch.cuda.device(self._device):
            return LoadedLayers(self.num_layers, self.places)

    def _pieces_at(self, codec: PageCodec, rows: Sequence[int], pages: Sequence[int]) -> Pieces:
        """Returns the pieces of rows on the GPU, and their places in pages of main memory."""
        row_numbers, begin = np.array(rows, np.uint64), np.array(pages, np.uint64) * self.page_bytes
        on_device = [part.data_ptr() + row_numbers * (part.stride(0) * WORD_BYTES) for part in codec.parts]
        on_host = [self._host.data_ptr() + begin + columns.start * WORD_BYTES for columns in self.columns]
        sizes = np.repeat([part.shape[1] * WORD_BYTES for part in codec.parts], len(rows)).astype(np.uint64)
        return Pieces(np.concatenate(on_device), np.concatenate(on_host), sizes)

    def _digests_of_states(self, states: Sequence[StateMove]) -> list[Tensor]:
        if not states or self._state_digests is None:
            return []
        return [self._state_digests.of([state.checkpoint for state in states])]

    def _end(self, ticket: int, digests: list[Tensor], begin: Any, copied: Any = None) -> None:
        found = digests[0] if len(digests) == 1 else torch.cat(digests)
        read = torch.empty(found.shape, dtype=torch.int64, pin_memory=True)
        read.copy_(found, non_blocking=True)
        end = _event()
        end.record()
        self._copies.append(_Copy(ticket, read, begin, copied or end, end))

    def take(self) -> list[Moved]:
        """Returns the copies that have ended since the last call, without waiting."""
        self._prove()
        ended = [copy for copy in self._copies if copy.end.query()]
        for copy in ended:
            self._copies.remove(copy)
        return [
            Moved(
                copy.ticket,
                copy.begin.elapsed_time(copy.copied) / 1000,
                [digest % MODULUS for digest in copy.digests.tolist()],
            )
            for copy in ended
        ]

    def wait(self, timeout_s: float) -> None:
        """Waits until a copy has ended, at most so long."""
        self._prove()
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
        result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)  # type: ignore[no-untyped-call]  # torch's
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
