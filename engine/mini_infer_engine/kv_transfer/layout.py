"""How keys and values lie in an engine's page pool, and which bytes of two pools are the same tokens'. No memory here.

A pool is [pages, layers, halves, page_size, heads, head]: the halves are keys and values, or one where a model keeps
one thing of each token. Pools whose pages differ in size are matched run by run, and those of tensor-parallel groups
whose ranks hold other heads token by token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

CONVERTIBLE = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes an element of the dtypes that are converted into each other where two engines differ."""


_Count = Annotated[int, Meta(ge=1, le=1 << 16)]
"""Checked where another engine's layout is decoded: sizes that are computed from such numbers fit into 64 bits."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Of one pool, or of each rank's pool of a tensor-parallel group."""

    num_layers: _Count
    halves: Annotated[int, Meta(ge=1, le=2)]
    page_size: _Count
    """Tokens a page."""
    num_heads: _Count
    head_bytes: _Count
    """Of one token's elements of a head."""
    dtype: Annotated[str, Meta(max_length=32)]
    """Of these."""
    scale_bytes: Annotated[int, Meta(ge=0, le=64)] = 0
    """Of one token and head in a quantised pool; they stand behind a half page's tokens."""
    tp_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    copies: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Ranks that hold the same heads, one after the other."""

    @property
    def total_heads(self) -> int:
        """Of the model."""
        return self.num_heads * self.tp_size // self.copies

    @property
    def is_convertible(self) -> bool:
        """Whether its elements can be converted to those of another such layout."""
        return self.dtype in CONVERTIBLE and not self.scale_bytes

    @property
    def head_elements(self) -> int:
        """Of one token and head, where it is convertible."""
        return self.head_bytes // CONVERTIBLE[self.dtype]

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

    @property
    def group_token_bytes(self) -> int:
        """Of one token on all ranks."""
        return self.token_bytes * self.tp_size


class KVMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A page pool in this process."""

    address: int
    num_pages: int
    device: Literal["cpu", "cuda"]
    device_index: int
    layout: KVLayout
    file: int | None = None
    """What other processes can map it by, where it is in main memory and shared: a descriptor of this process."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.num_pages * self.layout.page_bytes


def layout_fault(layout: KVLayout) -> str:
    """Returns what in a layout contradicts itself, or an empty string."""
    if layout.tp_size % layout.copies:
        return f"tp_size is {layout.tp_size}, no multiple of copies, which is {layout.copies}"
    size = CONVERTIBLE.get(layout.dtype, 1)
    if layout.head_bytes % size:
        return f"head_bytes is {layout.head_bytes}, no multiple of the {size} bytes of a {layout.dtype}"
    return ""


def layout_refusal(ours: KVLayout, theirs: KVLayout) -> str:
    """Why tokens of one pool cannot be copied into the other; empty: they can.

    Page sizes, numbers of ranks and floating-point dtypes may differ, but not where pages are quantised.
    """
    names = ["num_layers", "halves", "scale_bytes", "total_heads"]
    if ours.dtype != theirs.dtype and ours.is_convertible and theirs.is_convertible:
        names.append("head_elements")
    else:
        names += ["dtype", "head_bytes"]
    if ours.scale_bytes:  # a token has its scales elsewhere in the page: quantised pages move whole
        names += ["page_size", "tp_size"]
    for name in names:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{name} of the KV cache is {mine} here and {other} there: start both engines with the same"
    return ""


def alignment(ours: KVLayout, theirs: KVLayout) -> int:
    """Tokens of which multiples end a page, or a whole run, on both sides."""
    return math.lcm(ours.page_size, theirs.page_size)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads that one of our ranks moves from or to one of theirs."""

    their_rank: int
    our_first: int
    """Among the rank's heads."""
    their_first: int
    count: int


def head_shares(ours: KVLayout, rank: int, theirs: KVLayout) -> list[HeadShare]:
    """What one of our ranks moves, so that all ranks together move each head that a rank there holds, once.

    Of ranks here that hold the same heads, each serves others; where heads are read, each reads from another.
    """
    first = rank // ours.copies * ours.num_heads
    shares = []
    for their_rank in range(theirs.tp_size):
        their_first = their_rank // theirs.copies * theirs.num_heads
        begin, end = max(first, their_first), min(first + ours.num_heads, their_first + theirs.num_heads)
        if begin < end:
            shares.append(HeadShare(their_rank, begin - first, begin - their_first, end - begin))
    return shares


def shares_to_write(ours: KVLayout, rank: int, theirs: KVLayout) -> list[HeadShare]:
    """Every rank there gets each of its heads, from one of those here that hold it."""
    return [s for s in head_shares(ours, rank, theirs) if s.their_rank % ours.copies == rank % ours.copies]


def shares_to_read(ours: KVLayout, rank: int, theirs: KVLayout) -> list[HeadShare]:
    """A rank gets each of its heads, from one of those there that hold it."""
    return [s for s in head_shares(ours, rank, theirs) if s.their_rank % theirs.copies == rank % theirs.copies]


class Span(msgspec.Struct, frozen=True):
    """Tokens of one sequence that are to move, and where they lie on both sides; page lists begin at token 0."""

    our_pages: Sequence[int]
    their_pages: Sequence[int]
    begin: int
    end: int
    layers: tuple[int, int] | None = None
    """[from, to); None: all."""


def pieces(
    ours: KVLayout, theirs: KVLayout, span: Span, heads: HeadShare | None = None
) -> np.ndarray:  # [pieces, 3] int64: our offset, their offset, bytes
    """The bytes of a span in both pools; `heads` None: of all heads. The last page may be copied whole.

    Equal page sizes and heads make one piece a page, others one a run of the smaller page in each layer and half, or,
    where the heads of a token do not lie alike, one a token in each.
    """
    heads = heads or HeadShare(0, 0, 0, ours.num_heads)
    whole_rows = heads.count == ours.num_heads == theirs.num_heads
    low, high = span.layers or (0, ours.num_layers)
    if whole_rows and ours.page_size == theirs.page_size:
        begin, last = span.begin // ours.page_size, -(-span.end // ours.page_size)
        offset, size = low * ours.layer_bytes, (high - low) * ours.layer_bytes
        table = np.empty((last - begin, 3), np.int64)
        table[:, 0] = np.asarray(span.our_pages[begin:last], np.int64) * ours.page_bytes + offset
        table[:, 1] = np.asarray(span.their_pages[begin:last], np.int64) * theirs.page_bytes + offset
        table[:, 2] = size
        return table
    unit = math.gcd(ours.page_size, theirs.page_size) if whole_rows else 1
    runs = np.arange(span.begin // unit, -(-span.end // unit), dtype=np.int64) * unit
    halves = np.arange(low * ours.halves, high * ours.halves, dtype=np.int64)
    table = np.empty((len(runs), len(halves), 3), np.int64)
    sides = ((ours, span.our_pages, heads.our_first), (theirs, span.their_pages, heads.their_first))
    for column, (layout, pages, first_head) in enumerate(sides):
        page_ids = np.asarray(pages, np.int64)[runs // layout.page_size]
        in_page = (runs % layout.page_size) * layout.row_bytes + first_head * layout.head_bytes
        of_half = halves * layout.half_bytes
        table[:, :, column] = (page_ids * layout.page_bytes + in_page)[:, None] + of_half
    table[:, :, 2] = unit * heads.count * ours.head_bytes
    return table.reshape(-1, 3)
