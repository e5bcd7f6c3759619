"""Defines what a page of the device's pool becomes in the tiers below it. Knows neither main memory nor streams.

Tiers copy rows of `PageCodec.parts`, and hash them: with `RawPages` these are the pages themselves, with `PackedPages`
rows of staging memory on the device, where pages are packed before a store and unpacked after a load.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.device import to_device
from mini_infer_engine.models.kv_spec import SCALE_DTYPE
from mini_infer_engine.runtime.memory import int4_rows
from mini_infer_engine.runtime.memory.kv_pool import KVPool

if TYPE_CHECKING:  # it imports triton
    from mini_infer_engine.kernels.int4_pages import Int4Tables

WORD_BYTES = 8
_STAGING_BYTES = 32 << 20
"""Bytes of packed pages that are copied at a time, but at least one page. There are twice as many for each direction of
copies: one half is packed or unpacked while the other one is copied.
"""
_ALIGNMENT = 4096
_LEAST_ALIGNED = 16 * _ALIGNMENT
"""Bytes from which packed pages are padded to a multiple of 4,096, as direct I/O needs it."""


class PageCodec(Protocol):
    """The form of pages in lower tiers. One object serves one stream of copies."""

    name: str
    """Names the form in the identity of a tier's memory; empty for the pool's own."""
    parts: list[Tensor]
    """Memory of the device [rows, words] int64. A page takes one row of each part."""
    most_pages: int
    """Most pages that `rows_of` and the rest take at a time."""

    def for_another_stream(self) -> "PageCodec":
        """Returns a codec of the same pages whose calls may overlap with this one's."""

    def rows_of(self, pages: Sequence[int]) -> Sequence[int]:
        """Returns the row of each page, which belongs to it until other pages get rows for the second time."""

    def encode(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Fills the rows of these pages."""

    def decode(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Fills these pages from their rows."""


class RawPages:
    """Pages as they are in the pool, bit by bit."""

    name = ""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self.most_pages = parts[0].shape[0]

    def for_another_stream(self) -> "RawPages":
        """Returns this codec, which has no memory of its own."""
        return self

    def rows_of(self, pages: Sequence[int]) -> Sequence[int]:
        """Returns the pages: they are rows already."""
        return pages

    def encode(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Does nothing."""

    def decode(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Does nothing."""


class PackedPages:
    """Pages whose keys and values have four bits an element (`int4_rows`); what stands beside them is copied as it is.

    A packed page has the codes of all its rows, their scales, and then the other parts of the page.
    """

    name = int4_rows.NAME

    def __init__(self, storage: Tensor, row_size: int, beside: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Allocates staging memory. `storage` are whole pages [pages, elements] in `dtype`, which consist of rows of
        `row_size` elements; `beside` are other parts of the pages [pages, words] int64.
        """
        self._arguments = (storage, row_size, beside, dtype)
        self._pages = storage.view(dtype).view(storage.shape[0], -1, row_size)  # [pages, rows, row_size]
        self._beside = beside
        num_rows = self._pages.shape[1]
        sizes = [num_rows * row_size // 2, num_rows * SCALE_DTYPE.itemsize]
        sizes += [part.shape[1] * WORD_BYTES for part in beside]
        self._sizes = sizes
        alignment = _ALIGNMENT if sum(sizes) >= _LEAST_ALIGNED else WORD_BYTES
        page_bytes = -(-sum(sizes) // alignment) * alignment
        self.most_pages = max(1, _STAGING_BYTES // page_bytes)
        self._half_rows, self._is_second = self.most_pages, True
        self._staging = torch.zeros(2 * self.most_pages, page_bytes, dtype=torch.uint8, device=storage.device)
        self.parts = [self._staging.view(torch.int64)]
        if storage.is_cuda:
            self._tables = device_tables(row_size, dtype, storage.device)
            # Compiles the kernels before any request. The null page's zeros stay zeros.
            null_page = storage.shape[0] - 1
            with torch.inference_mode():
                self.encode([null_page], [0])
                self.decode([null_page], [0])

    def for_another_stream(self) -> "PackedPages":
        """Returns a codec with staging memory of its own."""
        return PackedPages(*self._arguments)

    def rows_of(self, pages: Sequence[int]) -> Sequence[int]:
        """Returns the first rows of the half of the staging memory that was not used last."""
        self._is_second = not self._is_second
        first = self._half_rows * self._is_second
        return range(first, first + len(pages))

    def encode(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Packs these pages into the staging memory."""
        codes, scales, *beside = self._fields(rows)
        index = self._on_device(pages)
        if self._pages.is_cuda:
            from mini_infer_engine.kernels.int4_pages import pack_pages

            pack_pages(self._pages, index, codes, scales, self._tables)
        else:
            for row, page in enumerate(pages):
                packed = int4_rows.pack_rows(self._pages[page])
                codes[row].view(packed[0].shape).copy_(packed[0])
                scales[row].copy_(packed[1])
        for staged, part in zip(beside, self._beside, strict=True):
            staged.copy_(part.index_select(0, index))

    def decode(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Unpacks these pages from the staging memory."""
        codes, scales, *beside = self._fields(rows)
        index = self._on_device(pages)
        if self._pages.is_cuda:
            from mini_infer_engine.kernels.int4_pages import unpack_pages

            unpack_pages(codes, scales, self._pages, index, self._tables)
        else:
            for row, page in enumerate(pages):
                target = self._pages[page]
                packed = codes[row].view(target.shape[0], -1), scales[row]
                target.copy_(int4_rows.unpack_rows(*packed, target.dtype))
        for staged, part in zip(beside, self._beside, strict=True):
            part.index_copy_(0, index, staged)

    def _on_device(self, pages: Sequence[int]) -> Tensor:
        return to_device(np.array(pages, np.int64), self._pages.device)

    def _fields(self, rows: Sequence[int]) -> list[Tensor]:
        """Returns views of rows that follow each other: codes [pages, bytes] uint8, scales [pages, rows], other parts
        as words.
        """
        padding = self._staging.shape[1] - sum(self._sizes)
        codes, scales, *beside, _ = torch.split(self._staging[rows[0] : rows[-1] + 1], [*self._sizes, padding], dim=1)
        return [codes, scales.view(SCALE_DTYPE), *(part.view(torch.int64) for part in beside)]


def device_tables(row_size: int, dtype: torch.dtype, device: torch.device) -> "Int4Tables":
    """Returns the constants of the format for kernels."""
    from mini_infer_engine.kernels.int4_pages import Int4Tables

    rotation = (int4_rows.rotation(row_size) * row_size**0.5).round().to(device, dtype)
    return Int4Tables(rotation, *(torch.tensor(x, device=device) for x in (int4_rows.THRESHOLDS, int4_rows.LEVELS)))


def make_codec(pool: KVPool, tier_dtype: str) -> PageCodec:
    """Returns a codec of a pool's pages for `--kv-tier-dtype`, which `check_tier_dtype` has found to suit the pool."""
    parts = pool.words()
    if tier_dtype == "auto":
        return RawPages(parts)
    spec = pool.spec
    size = int4_rows.row_size(*spec.head_dims)
    assert size is not None, "check_tier_dtype refuses such heads"
    return PackedPages(pool.storage, size, parts[1:], spec.dtype)
