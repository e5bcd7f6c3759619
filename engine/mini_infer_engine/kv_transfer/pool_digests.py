"""Computes the digest of a span of tokens, as `token_digests` defines it, from one rank's page pool.

The producer's digest is that of what arrives: each head as often as ranks of the consumer receive it, in the consumer's
dtype. The consumer's is that of all of its heads. In main memory it is computed at once, by numpy; on a GPU a kernel
runs on a stream of its own, beside the passes. The tokens must have been computed, and stay where they are until it has
ended.
"""

import ctypes
import importlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mini_infer_engine.kv_transfer.layout import HeadShare, KVLayout, KVMemory, Span, shares_to_write
from mini_infer_engine.kv_transfer.staging.staging_copies import converted
from mini_infer_engine.kv_transfer.staging.tensor_memory import DeviceBytes
from mini_infer_engine.kv_transfer.token_digests import (
    GOLDEN,
    MODULUS,
    STATE_TOKEN,
    Region,
    mix_words,
    num_rows,
    place_factors,
    regions,
    token_factors,
    word_bytes_of,
)
from mini_infer_engine.kv_transfer.transport import BUSY_S, Digest, KnownDigest, Progress

_TOKENS_AT_ONCE = 256
"""Tokens that are converted to another dtype at a time on a GPU."""
_HEADER = 2
"""Numbers before those of the pages on a GPU: the sum, and the number of the first token."""
_MOST_KERNELS = 64
"""Shares of heads whose kernels are kept ready for their next launch."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens that follow each other in a sequence."""

    pages: np.ndarray  # [pages] int64
    first_offset: int
    """The place of the first token in the first page."""
    first_number: int
    """The number of the first token, which decides its factor."""
    count: int

    def places(self, page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the page and the offset in it [tokens] int64, and the factor [tokens] uint64 of each token."""
        tokens = np.arange(self.count, dtype=np.int64)
        places = self.first_offset + tokens
        return self.pages[places // page_size], places % page_size, token_factors(self.first_number + tokens)


class PoolDigests:
    """Digests of one pool, that of pages or that of recurrent states."""

    def __init__(self, memory: KVMemory, rank: int = 0) -> None:
        self._memory, self._rank = memory, rank
        self._words: _HostWords | _DeviceWords | None = None

    def begin(self, span: Span, consumer: KVLayout | None) -> Digest:
        """Begins to compute the digest of `span.our_pages` for a consumer with this layout of the pool; None means that
        this engine is the consumer.
        """
        ours = self._memory.layout
        target = ours if consumer is None else consumer
        shares = _whole(ours) if consumer is None else shares_to_write(ours, self._rank, consumer)
        size, begin = ours.page_size, span.begin
        pages = np.asarray(span.our_pages[begin // size : -(-span.end // size)], np.int64)
        number = begin + STATE_TOKEN * (span.pool == "states")
        tokens = _Tokens(pages, begin % size, number, span.end - begin)
        first = self._rank // ours.copies * ours.num_heads
        return self._open().digest(tokens, target, shares, first)

    def prepare(self) -> None:
        """Compiles the kernel of a GPU now: a transfer that waited for that would be late."""
        if self._memory.device == "cuda":
            digest = self.begin(Span([0], [], 0, 1), None)
            while digest.progress() == "busy":
                time.sleep(BUSY_S)

    def _open(self) -> "_HostWords | _DeviceWords":
        if self._words is None:
            self._words = _DeviceWords(self._memory) if self._memory.device == "cuda" else _HostWords(self._memory)
        return self._words


def _whole(layout: KVLayout) -> list[HeadShare]:
    return [HeadShare(0, 0, 0, layout.num_heads)]


class _HostWords:
    """The words of a pool in main memory."""

    def __init__(self, memory: KVMemory) -> None:
        whole = (ctypes.c_uint8 * memory.size).from_address(memory.address)
        layout = memory.layout
        self._layout = layout
        self._pages: np.ndarray = np.ctypeslib.as_array(whole).reshape(-1, num_rows(layout), layout.half_bytes)
        self._factors: dict[tuple[Region, int, int], np.ndarray] = {}

    def digest(self, tokens: _Tokens, target: KVLayout, shares: Sequence[HeadShare], first_head: int) -> Digest:
        """Returns the digest of some heads of these tokens."""
        pages, offsets, factors = tokens.places(self._layout.page_size)
        total = 0
        starts = [0, *(np.flatnonzero(np.diff(pages)) + 1).tolist(), len(pages)]
        for begin, end in itertools.pairwise(starts):  # the tokens of one page, which follow each other
            rows = self._pages[pages[begin]], slice(int(offsets[begin]), int(offsets[end - 1]) + 1)
            sums = sum(self._sums(*rows, target, share, first_head) for share in shares)
            total += int(np.dot(sums, factors[begin:end])) if shares else 0
        return KnownDigest(total % MODULUS)

    def _sums(self, page: np.ndarray, tokens: slice, target: KVLayout, share: HeadShare, first_head: int) -> np.ndarray:
        """Returns the sum [tokens] uint64 of some heads of tokens of one page [rows, bytes]."""
        ours = self._layout
        elements = page[:, : ours.page_size * ours.row_bytes]
        cells = elements.reshape(len(page), ours.page_size, ours.num_heads, ours.head_bytes)
        cells = cells[:, tokens, share.our_first : share.our_first + share.count]
        if ours.dtype != target.dtype:
            values = converted(np.ascontiguousarray(cells).reshape(-1), ours.dtype, target.dtype)
            cells = values.view(np.uint8).reshape(*cells.shape[:-1], target.head_bytes)
        element_words, *scales = regions(target, ours.total_heads, word_bytes_of(target))
        first = first_head + share.our_first
        total = self._dot(element_words, np.moveaxis(cells, 1, 0), first)
        for region in scales:
            found = page[:, ours.page_size * ours.row_bytes :].reshape(len(page), ours.num_heads, ours.page_size, -1)
            total = total + self._dot(region, np.moveaxis(found[:, :, tokens], 2, 0), first)
        return total

    def _dot(self, region: Region, cells: np.ndarray, first: int) -> np.ndarray:
        """Returns the sum [tokens] of words * factors, of cells [tokens, rows, heads, bytes]."""
        tokens, rows, heads, _ = cells.shape
        key = region, first, heads
        if key not in self._factors:
            self._factors[key] = place_factors(region, rows, first, heads).reshape(-1)
        words, factors, sums = cells.view(f"u{region.word_bytes}"), self._factors[key], np.empty(tokens, np.uint64)
        own, mixed = np.empty((2, *words.shape[1:]), np.uint64)  # of one token: they stay in the core's cache
        for token in range(tokens):
            np.copyto(own, words[token])
            mix_words(own, mixed)
            sums[token] = np.dot(mixed.reshape(-1), factors)  # `@` on all tokens would be far slower
        return sums


class _Numbers:
    """The memory through which the numbers of one digest go to a GPU, and its sum comes back."""

    def __init__(self, torch: Any, most_pages: int, device: Any) -> None:
        sizes = _HEADER + most_pages
        self._sent = torch.zeros(sizes, dtype=torch.int64, pin_memory=True)
        self._array: np.ndarray = self._sent.numpy()
        self.on_device = torch.empty(sizes, dtype=torch.int64, device=device)
        """The sum, the number of the first token, and the pages."""
        self._found = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._read = torch.cuda.Event()

    def send(self, tokens: _Tokens) -> None:
        """Queues the copy of the numbers of tokens, with a sum of zero."""
        count = _HEADER + len(tokens.pages)
        self._array[1] = tokens.first_number
        self._array[_HEADER:count] = tokens.pages
        self.on_device[:count].copy_(self._sent[:count], non_blocking=True)

    def read(self, stream: Any) -> None:
        """Queues the copy of the sum to main memory, on the current stream."""
        self._found.copy_(self.on_device[:1], non_blocking=True)
        self._read.record(stream)

    @property
    def has_come(self) -> bool:
        """True once the sum is in main memory, and nothing uses this memory any more."""
        return bool(self._read.query())

    @property
    def total(self) -> int:
        """The sum, once it has come."""
        return int(self._found) % MODULUS


class _DeviceDigest:
    """A digest that a GPU computes."""

    def __init__(self, numbers: _Numbers, free: list[_Numbers]) -> None:
        """Takes the memory of its numbers, and where that goes once the digest is done."""
        self._numbers, self._free = numbers, free
        self._progress: Progress = "busy"
        self.value = 0
        """The digest, once it is `done`."""

    def progress(self) -> Progress:
        """Returns the state without waiting."""
        if self._progress == "busy" and self._numbers.has_come:
            self._progress, self.value = "done", self._numbers.total
            self._free.append(self._numbers)
        return self._progress


class _DeviceWords:
    """The words of a pool on a GPU."""

    def __init__(self, memory: KVMemory) -> None:
        self._torch = torch = importlib.import_module("torch")
        self._kernel = importlib.import_module("mini_infer_engine.kernels.token_digests").TokenSums
        self._layout, self._num_pages = memory.layout, memory.num_pages
        self._where = torch.device("cuda", memory.device_index)
        self._bytes = torch.as_tensor(DeviceBytes(memory), device=self._where)
        self._stream = torch.cuda.Stream(self._where, priority=-1)  # ahead of the prefill's kernels
        self._free: list[_Numbers] = []
        self._kernels = lru_cache(_MOST_KERNELS)(self._make_kernels)

    def digest(self, tokens: _Tokens, target: KVLayout, shares: Sequence[HeadShare], first_head: int) -> Digest:
        """Begins the digest of some heads of these tokens."""
        # A short digest takes as long as what the host does for it: two small copies through memory that is there
        # already, and a launch for each share.
        ours = self._layout
        with self._torch.inference_mode(), self._torch.cuda.stream(self._stream):
            numbers = self._numbers_for(len(tokens.pages))
            numbers.send(tokens)
            for share in shares:
                if ours.dtype == target.dtype:
                    for kernel in self._kernels(word_bytes_of(target), share, first_head):
                        kernel.add(numbers.on_device, tokens.count, tokens.first_offset)
                else:
                    self._add_converted(numbers.on_device, tokens, target, share, first_head)
            numbers.read(self._stream)
        return _DeviceDigest(numbers, self._free)

    def _numbers_for(self, num_pages: int) -> _Numbers:
        """Returns memory for so many pages that no digest under way uses."""
        if self._free and num_pages <= self._num_pages:
            return self._free.pop()
        return _Numbers(self._torch, max(num_pages, self._num_pages), self._where)

    def _make_kernels(self, word_bytes: int, share: HeadShare, first_head: int) -> list[Any]:
        """Returns the kernels that add up some heads of tokens, one for each region of the pool."""
        torch, layout = self._torch, self._layout
        kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
        return [
            self._kernel(
                self._bytes.view(kinds[region.word_bytes]),
                page_size=layout.page_size,
                page_words=layout.page_bytes // region.word_bytes,
                half_words=layout.half_bytes // region.word_bytes,
                first_word=region.first_word + share.our_first * region.head_stride,
                token_stride=region.token_stride,
                head_stride=region.head_stride,
                head_words=region.head_words,
                num_rows=num_rows(layout),
                num_heads=share.count,
                first_column=(first_head + share.our_first) * region.head_words,
                first_index=region.first_index,
                row_indices=region.row_indices,
                golden=GOLDEN - MODULUS,
            )
            for region in regions(layout, layout.total_heads, word_bytes)
        ]

    def _add_converted(
        self, numbers: Any, tokens: _Tokens, target: KVLayout, share: HeadShare, first_head: int
    ) -> None:
        """Adds the sum of tokens in the consumer's dtype, which no kernel of ours converts: some at a time."""
        torch, ours = self._torch, self._layout
        sizes = (self._num_pages, num_rows(ours), ours.page_size, ours.num_heads, -1)
        cells = self._bytes.view(getattr(torch, ours.dtype)).view(sizes)
        [region] = regions(target, ours.total_heads, word_bytes_of(target))
        words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[region.word_bytes]
        first = first_head + share.our_first
        factors = torch.from_numpy(place_factors(region, num_rows(ours), first, share.count).view(np.int64))
        factors = factors.to(self._where).reshape(-1)
        mask = -1 if region.word_bytes == 8 else 256**region.word_bytes - 1
        pages, offsets, of_tokens = tokens.places(ours.page_size)
        places = torch.from_numpy(np.stack([pages, offsets, of_tokens.view(np.int64)])).to(self._where)
        for some in places.split(_TOKENS_AT_ONCE, dim=1):
            found = cells[some[0], :, some[1], share.our_first : share.our_first + share.count]
            wide = found.to(getattr(torch, target.dtype)).contiguous().view(words).flatten(1).to(torch.int64) & mask
            numbers[:1] += (((wide ^ ((wide >> 32) & 0xFFFFFFFF)) * factors).sum(dim=1) * some[2]).sum()
