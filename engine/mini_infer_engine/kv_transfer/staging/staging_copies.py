"""Copies between a page pool and staging slots: gathers tokens to send, and scatters received ones into pages.

It uses numpy if the pool is in main memory, and torch on a stream of its own if it is on a GPU. A pool is [pages,
layers, halves, page_size, heads, head]. Gathered tokens are [tokens, layers, halves, heads, head], or [pages, layers,
bytes] if pages are copied whole.
"""

import ctypes
import importlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from mini_infer_engine.kv_transfer.cuda_driver import CudaDriver, CudaError
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.staging.row_copies import copy_rows
from mini_infer_engine.kv_transfer.staging.tensor_memory import DeviceBytes
from mini_infer_engine.kv_transfer.staging_slots import Area, Block, moves_whole_pages

log = logging.getLogger(__name__)

IsDone = Callable[[], bool]
"""A function that returns True once the copies have ended. Any thread may call it."""


class StagingCopies(Protocol):
    """Copies between one pool and one staging buffer."""

    address: int
    """Address of the buffer."""
    device: str
    """Device of the buffer: "cpu" or "cuda"."""

    def gather(self, producer: KVLayout, consumer: KVLayout, span: Span, block: Block, offset: int) -> None:
        """Begins to copy a block of `span.our_pages` into the buffer, from byte `offset` on."""

    def scatter(self, producer: KVLayout, consumer: KVLayout, span: Span, block: Block, offset: int) -> None:
        """Begins to copy a block from byte `offset` of the buffer into `span.our_pages`, in the consumer's dtype."""

    def mark(self) -> IsDone:
        """Returns a function that is True once all copies begun until now have ended."""


def open_copies(memory: KVMemory, area: Area, num_bytes: int) -> StagingCopies:
    """Allocates a staging buffer for the pool, and returns the copies between the two."""
    return HostCopies(memory, num_bytes) if memory.device == "cpu" else TorchCopies(memory, area, num_bytes)


def _positions(layout: KVLayout, span: Span) -> tuple[np.ndarray, np.ndarray]:  # [tokens] int64 each
    """Returns the page of each token, and its offset in the page."""
    tokens = np.arange(span.begin, span.end, dtype=np.int64)
    return np.asarray(span.our_pages, np.int64)[tokens // layout.page_size], tokens % layout.page_size


def _whole_pages(layout: KVLayout, span: Span) -> np.ndarray:  # [pages] int64
    first, last = span.begin // layout.page_size, -(-span.end // layout.page_size)
    return np.asarray(span.our_pages[first:last], np.int64)


def _layers(layout: KVLayout, span: Span) -> slice:
    return slice(*(span.layers or (0, layout.num_layers)))


class HostCopies:
    """Implements `StagingCopies` by numpy. Each copy has ended when the call returns."""

    device = "cpu"

    def __init__(self, memory: KVMemory, num_bytes: int) -> None:
        self._memory = memory
        whole = (ctypes.c_uint8 * memory.size).from_address(memory.address)
        self._pool: np.ndarray = np.ctypeslib.as_array(whole)
        self._buffer = np.zeros(num_bytes, np.uint8)
        self.address = self._buffer.ctypes.data

    def gather(self, producer: KVLayout, consumer: KVLayout, span: Span, block: Block, offset: int) -> None:
        """Copies a block into the buffer, synchronously."""
        staged, layers = self._buffer[offset : offset + block.size], _layers(producer, span)
        if moves_whole_pages(producer, consumer):
            found = self._pages()[_whole_pages(producer, span), layers]
        else:
            pages, offsets = _positions(producer, span)
            first = block.share.our_first
            heads = slice(first, first + block.share.count)
            found = self._cells(producer)[pages, layers, :, offsets, heads]
        staged[:] = found.view(np.uint8).reshape(-1)

    def scatter(self, producer: KVLayout, consumer: KVLayout, span: Span, block: Block, offset: int) -> None:
        """Copies a block into pages, synchronously."""
        staged, layers = self._buffer[offset : offset + block.size], _layers(consumer, span)
        if moves_whole_pages(producer, consumer):
            num_layers = layers.stop - layers.start
            self._pages()[_whole_pages(consumer, span), layers] = staged.reshape(-1, num_layers, consumer.layer_bytes)
            return
        (pages, offsets), first = _positions(consumer, span), block.share.their_first
        values = converted(staged, producer.dtype, consumer.dtype).view(np.uint8)
        sizes = (len(pages), layers.stop - layers.start, consumer.halves, block.share.count, consumer.head_bytes)
        heads = slice(first, first + block.share.count)
        self._cells(consumer)[pages, layers, :, offsets, heads] = values.reshape(sizes)

    def mark(self) -> IsDone:
        """Returns a function that is always True."""
        return lambda: True

    def _pages(self) -> np.ndarray:
        layout = self._memory.layout
        pages: np.ndarray = self._pool.reshape(self._memory.num_pages, layout.num_layers, layout.layer_bytes)
        return pages

    def _cells(self, layout: KVLayout) -> np.ndarray:
        sizes = (layout.num_layers, layout.halves, layout.page_size, layout.num_heads, layout.head_bytes)
        cells: np.ndarray = self._pool.reshape(self._memory.num_pages, *sizes)
        return cells


def converted(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """Converts bytes of one dtype's elements to elements of another, rounded to nearest even if that one has fewer
    bits.
    """
    if source == target:
        return values
    match source:
        case "bfloat16":
            exact = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case _:
            exact = values.view(source).astype(np.float32)
    if target != "bfloat16":
        with np.errstate(over="ignore"):  # what float16 cannot hold becomes infinite, as torch has it
            return exact.astype(target)
    bits = exact.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(exact), np.uint16(0x7FC0), rounded)


_LEAST_COPY_BYTES = 32 << 10
"""The least bytes of a page's layers for which a copy of its own pays: the host needs 5 us for each."""


class TorchCopies:
    """Implements `StagingCopies` by torch, on a CUDA stream of its own. The pages that it reads must have been
    computed.

    The copy engines move whole pages to and from main memory, consecutive pages in one call. A gather kernel would wait
    for free SMs behind the prefill that still computes, and Python code in this thread delays the core's thread.
    """

    def __init__(self, memory: KVMemory, area: Area, num_bytes: int, pool: Any = None) -> None:
        """Allocates the buffer. `pool` is the pool's bytes as a tensor if it is not on a GPU."""
        self._torch = torch = importlib.import_module("torch")
        self._memory = memory
        on_gpu = memory.device == "cuda"
        self._where = torch.device("cuda", memory.device_index) if on_gpu else torch.device("cpu")
        self._pool = torch.as_tensor(DeviceBytes(memory), device=self._where) if on_gpu else pool
        if area == "device":
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._where)
        else:
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.device = "cuda" if area == "device" and on_gpu else "cpu"
        self.address = self._buffer.data_ptr()
        # Ahead of the prefill's kernels, which are many and long, where kernels are needed.
        self._stream = torch.cuda.Stream(self._where, priority=-1) if on_gpu else None
        self._driver = CudaDriver() if on_gpu else None

    def gather(self, producer: KVLayout, consumer: KVLayout, span: Span, block: Block, offset: int) -> None:
        """Queues the copy of a block into the buffer."""
        with self._torch.cuda.stream(self._stream):
            if pairs := self._whole_copies(producer, consumer, span, block, offset):
                for pages, staged in pairs:
                    self._copy_rows(staged, pages)
                return
            if moves_whole_pages(producer, consumer):
                found = self._pages()[:, _layers(producer, span)][self._indices(_whole_pages(producer, span))]
            else:
                pages, offsets = map(self._indices, _positions(producer, span))
                first = block.share.our_first
                found = self._cells(producer, self._words(producer), first, block.share.count, span)[
                    pages, :, :, offsets
                ]
            staged = self._buffer[offset : offset + block.size]
            staged.copy_(found.contiguous().view(self._torch.uint8).view(-1), non_blocking=True)

    def scatter(self, producer: KVLayout, consumer: KVLayout, span: Span, block: Block, offset: int) -> None:
        """Queues the copy of a block into pages."""
        torch = self._torch
        with torch.cuda.stream(self._stream):
            if pairs := self._whole_copies(producer, consumer, span, block, offset):
                for pages, staged in pairs:
                    self._copy_rows(pages, staged)
                return
            staged = self._buffer[offset : offset + block.size].to(self._where, non_blocking=True)
            if moves_whole_pages(producer, consumer):
                pages, view = self._indices(_whole_pages(consumer, span)), self._pages()[:, _layers(consumer, span)]
                view[pages] = staged.view(view.dtype).view(len(pages), *view.shape[1:])
                return
            pages, offsets = map(self._indices, _positions(consumer, span))
            if producer.dtype == consumer.dtype:
                words = self._words(consumer)
                values = staged.view(words)
            else:
                words = getattr(torch, consumer.dtype)
                values = staged.view(getattr(torch, producer.dtype)).to(words)
            view = self._cells(consumer, words, block.share.their_first, block.share.count, span)
            view[pages, :, :, offsets] = values.view(len(pages), *view.shape[1:3], *view.shape[4:])

    def mark(self) -> IsDone:
        """Records a CUDA event, and returns a function that queries it."""
        if self._stream is None:
            return lambda: True
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return lambda: bool(event.query())

    def _whole_copies(
        self, producer: KVLayout, consumer: KVLayout, span: Span, block: Block, offset: int
    ) -> list[tuple[Any, Any]]:
        """Returns pairs of tensors: layers of consecutive pages [pages, n] in the pool, and their place in the buffer.

        The list is empty if one kernel for all pages is faster.
        """
        if self.device == "cuda" or not moves_whole_pages(producer, consumer):
            return []
        pages, layers = _whole_pages(producer, span), _layers(producer, span)
        staged = self._buffer[offset : offset + block.size].view(len(pages), -1)
        if staged.shape[1] < _LEAST_COPY_BYTES:
            return []
        pool, found, begin = self._pages()[:, layers].flatten(1), [], 0
        for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
            there = staged[begin : begin + len(run)].view(pool.dtype)
            found.append((pool[run[0] : run[0] + len(run)], there))
            begin += len(run)
        return found

    def _copy_rows(self, target: Any, source: Any) -> None:
        if self._driver is not None and self._stream is not None:
            try:
                copy_rows(self._driver, target, source, self._stream.cuda_stream)
                return
            except CudaError as error:
                log.warning("pages are copied one by one from now on: %s", error)
                self._driver = None
        for row, whence in zip(target, source, strict=True):
            row.copy_(whence, non_blocking=True)

    def _indices(self, values: np.ndarray) -> Any:
        return self._torch.from_numpy(values).to(self._where, non_blocking=True)

    def _words(self, layout: KVLayout) -> Any:
        """Returns the widest integer dtype that divides a head, so that fewer elements are copied."""
        torch = self._torch
        widths = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
        return next(kind for size, kind in widths if layout.head_bytes % size == 0)

    def _pages(self) -> Any:
        layout, torch = self._memory.layout, self._torch
        words = torch.int64 if layout.layer_bytes % 8 == 0 else torch.uint8
        return self._pool.view(words).view(self._memory.num_pages, layout.num_layers, -1)

    def _cells(self, layout: KVLayout, words: Any, first: int, count: int, span: Span) -> Any:
        """Returns a view [pages, layers, halves, page_size, heads, head] of the pool, with the span's layers and
        `count` heads.
        """
        sizes = (layout.num_layers, layout.halves, layout.page_size, layout.num_heads)
        cells = self._pool.view(words).view(self._memory.num_pages, *sizes, -1)
        return cells[:, _layers(layout, span), :, :, first : first + count]
