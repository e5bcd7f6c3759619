"""How keys and values lie in an engine's page pool, and which bytes of two pools are the same tokens'. No memory here.

A pool is [pages, layers, halves, page_size, heads, head]: the halves are keys and values, or one where a model keeps
one thing of each token. Pools whose pages differ in size are matched run by run.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Of one pool, or of one rank's pool of a tensor-parallel group."""

    num_layers: int
    halves: int
    page_size: int
    """Tokens a page."""
    num_heads: int
    head_bytes: int
    """Of one token's elements of a head."""
    dtype: str
    """Of these."""
    scale_bytes: int = 0
    """Of one token and head in a quantised pool; they stand behind a half page's tokens."""
    tp_size: int = 1

    @property
    def row_bytes(self) -> int:
        """Of one token in one half of one layer, without its scales."""
        return self.num_heads * self.head_bytes

    @property
    def half_bytes(self) -> int:
        """Of one half of one page in one layer."""
        return self.page_size * (self.row_bytes + self.num_heads * self.scale_bytes)

    @property
    def layer_bytes(self) -> int:
        """Of one page in one layer."""
        return self.halves * self.half_bytes

    @property
    def page_bytes(self) -> int:
        """Of one page."""
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Of one token in all layers."""
        return self.page_bytes // self.page_size


class KVMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A page pool in this process."""

    address: int
    num_pages: int
    device: Literal["cpu", "cuda"]
    device_index: int
    layout: KVLayout

    @property
    def size(self) -> int:
        """Bytes."""
        return self.num_pages * self.layout.page_bytes


def layout_refusal(ours: KVLayout, theirs: KVLayout) -> str:
    """Why tokens of one pool cannot be copied into the other; empty: they can.

    Pages may differ in size, but not where they are quantised.
    """
    names = ["num_layers", "halves", "dtype", "scale_bytes", "tp_size", "num_heads", "head_bytes"]
    if ours.scale_bytes:  # a run of tokens has its scales elsewhere: quantised pages move whole
        names.append("page_size")
    for name in names:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{name} of the KV cache is {mine} here and {other} there: start both engines with the same"
    return ""


def alignment(ours: KVLayout, theirs: KVLayout) -> int:
    """Tokens of which multiples end a page, or a whole run, on both sides."""
    return math.lcm(ours.page_size, theirs.page_size)


def pieces(
    ours: KVLayout,
    our_pages: Sequence[int],
    theirs: KVLayout,
    their_pages: Sequence[int],
    tokens: tuple[int, int],
    layers: tuple[int, int] | None = None,
) -> np.ndarray:  # [pieces, 3] int64: our offset, their offset, bytes
    """The bytes of tokens [from, to) in both pools; page lists begin at token 0. The last page may be copied whole.

    `layers` [from, to): of these alone; None: of all. Equal page sizes make one piece a page, others one a run of the
    smaller page in each layer and half.
    """
    first, end = tokens
    low, high = layers or (0, ours.num_layers)
    if ours.page_size == theirs.page_size:
        begin, last = first // ours.page_size, -(-end // ours.page_size)
        offset, size = low * ours.layer_bytes, (high - low) * ours.layer_bytes
        table = np.empty((last - begin, 3), np.int64)
        table[:, 0] = np.asarray(our_pages[begin:last], np.int64) * ours.page_bytes + offset
        table[:, 1] = np.asarray(their_pages[begin:last], np.int64) * theirs.page_bytes + offset
        table[:, 2] = size
        return table
    unit = math.gcd(ours.page_size, theirs.page_size)
    runs = np.arange(first // unit, -(-end // unit), dtype=np.int64) * unit
    halves = np.arange(low * ours.halves, high * ours.halves, dtype=np.int64)
    table = np.empty((len(runs), len(halves), 3), np.int64)
    for column, layout, pages in ((0, ours, our_pages), (1, theirs, their_pages)):
        page_ids = np.asarray(pages, np.int64)[runs // layout.page_size]
        in_page = (runs % layout.page_size) * layout.row_bytes
        of_half = halves * layout.half_bytes
        table[:, :, column] = (page_ids * layout.page_bytes + in_page)[:, None] + of_half
    table[:, :, 2] = unit * ours.row_bytes
    return table.reshape(-1, 3)
