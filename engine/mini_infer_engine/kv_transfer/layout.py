"""Describes the layout of keys and values in a page pool, and computes which bytes of two pools belong to the same
tokens. It touches no memory.

A pool is [pages, layers, halves, page_size, heads, head]. The halves are keys and values; a model that keeps one tensor
for each token (as MLA does) has one half. Pools whose page sizes differ are matched run by run. Pools of
tensor-parallel groups whose ranks have different heads are matched token by token.

Recurrent states are a pool of their own beside the pages (`KVLayout.states`): a slot of one sequence is a page of one
token, and the bytes of a layer are divided into equal heads that have no meaning.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

CONVERTIBLE = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of the dtypes that are converted into each other if two engines differ."""

Pool = Literal["pages", "states"]
"""A pool of an engine: its pages, or the slots of its recurrent states."""
STATE_UNIT_BYTES = 512
"""The bytes of a head of a pool of states. Each layer of a slot is padded to a multiple of them."""


_Count = Annotated[int, Meta(ge=1, le=1 << 16)]
"""A count in another engine's layout. It is bounded when it is decoded, so that sizes computed from such numbers fit
into 64 bits.
"""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of one pool, or of each rank's pool in a tensor-parallel group."""

    num_layers: _Count
    halves: Annotated[int, Meta(ge=1, le=2)]
    page_size: _Count
    """Tokens per page."""
    num_heads: _Count
    head_bytes: _Count
    """Bytes of one token's elements of one head."""
    dtype: Annotated[str, Meta(max_length=32)]
    """Name of the elements' dtype."""
    scale_bytes: Annotated[int, Meta(ge=0, le=64)] = 0
    """Bytes of the scales of one token and head in a quantised pool, which follow the tokens of each half page."""
    tp_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    copies: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Number of consecutive ranks that have the same heads."""
    states: "KVLayout | None" = None
    """The layout of the pool of recurrent states, if some layers have such a state. It has no `states` itself."""

    def of(self, pool: Pool) -> "KVLayout":
        """Returns the layout of one of the engine's pools. Raises ValueError if it has no states."""
        if pool == "pages":
            return self
        if self.states is None:
            raise ValueError("this model has no recurrent states")
        return self.states

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence, on all ranks; 0 if there is none."""
        return 0 if self.states is None else self.states.page_bytes * self.states.tp_size

    @property
    def total_heads(self) -> int:
        """Number of KV heads of the model."""
        return self.num_heads * self.tp_size // self.copies

    @property
    def is_convertible(self) -> bool:
        """True if its elements can be converted to those of another convertible layout."""
        return self.dtype in CONVERTIBLE and not self.scale_bytes

    @property
    def head_elements(self) -> int:
        """Elements of one token and head; the layout must be convertible."""
        return self.head_bytes // CONVERTIBLE[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one half of one layer, without its scales."""
        return self.num_heads * self.head_bytes

    @property
    def half_bytes(self) -> int:
        """Bytes of one half of one page in one layer."""
        return self.page_size * (self.row_bytes + self.num_heads * self.scale_bytes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.halves * self.half_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.page_bytes // self.page_size

    @property
    def group_token_bytes(self) -> int:
        """Bytes of one token in all layers, on all ranks."""
        return self.token_bytes * self.tp_size


class KVMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A page pool in this process."""

    address: int
    num_pages: int
    device: Literal["cpu", "cuda"]
    device_index: int
    layout: KVLayout
    file: int | None = None
    """File descriptor of this process by which other processes map the pool. None unless it is in shared main memory.
    """
    states: "KVMemory | None" = None
    """The pool of recurrent states, whose pages are slots: those of running sequences, then those of checkpoints."""

    @property
    def size(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.layout.page_bytes


def layout_fault(layout: KVLayout) -> str:
    """Returns the contradiction in a layout, or an empty string."""
    if layout.tp_size % layout.copies:
        return f"tp_size is {layout.tp_size}, no multiple of copies, which is {layout.copies}"
    size = CONVERTIBLE.get(layout.dtype, 1)
    if layout.head_bytes % size:
        return f"head_bytes is {layout.head_bytes}, no multiple of the {size} bytes of a {layout.dtype}"
    states = layout.states
    if states is not None and (states.states is not None or states.page_size != 1 or states.tp_size != layout.tp_size):
        return "its recurrent states are no pool of one slot for each sequence on each rank"
    return "" if states is None else layout_fault(states)


def layout_refusal(ours: KVLayout, theirs: KVLayout) -> str:
    """Returns the reason why tokens of one pool cannot be copied into the other, or an empty string if they can.

    Page sizes, numbers of ranks and floating-point dtypes may differ, unless the pages are quantised. Recurrent states
    must be alike on both sides, rank by rank.
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
    return _states_refusal(ours, theirs)


def _states_refusal(ours: KVLayout, theirs: KVLayout) -> str:
    if ours.states is None or theirs.states is None:
        same = ours.states is theirs.states
        return "" if same else "one of the engines has recurrent states and the other none: serve the same model"
    for name in ("tp_size", "num_layers", "dtype", "num_heads", "head_bytes"):
        mine, other = getattr(ours.states, name), getattr(theirs.states, name)
        if mine != other:
            return f"{name} of the recurrent states is {mine} here and {other} there: start both engines with the same"
    return ""


def alignment(ours: KVLayout, theirs: KVLayout) -> int:
    """Returns the number of tokens whose multiples end a page, or a whole run, on both sides."""
    return math.lcm(ours.page_size, theirs.page_size)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads that one of our ranks exchanges with one rank of the peer."""

    their_rank: int
    our_first: int
    """First head, counted among our rank's heads."""
    their_first: int
    count: int


def head_shares(ours: KVLayout, rank: int, theirs: KVLayout) -> list[HeadShare]:
    """Returns the heads that one of our ranks has in common with each rank of the peer.

    Ranks that have the same heads get the same shares: `shares_to_write` and `shares_to_read` choose one of them for
    each.
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
    """Returns the heads that one of our ranks writes. Each rank of the peer gets each of its heads from exactly one of
    our ranks that have it.
    """
    return [s for s in head_shares(ours, rank, theirs) if s.their_rank % ours.copies == rank % ours.copies]


def shares_to_read(ours: KVLayout, rank: int, theirs: KVLayout) -> list[HeadShare]:
    """Returns the heads that one of our ranks reads. It gets each of its heads from exactly one rank of the peer that
    has it.
    """
    return [s for s in head_shares(ours, rank, theirs) if s.their_rank % theirs.copies == rank % theirs.copies]


class Span(msgspec.Struct, frozen=True):
    """Tokens [begin, end) of one sequence to move, with the sequence's pages on both sides from token 0 on."""

    our_pages: Sequence[int]
    their_pages: Sequence[int]
    begin: int
    end: int
    layers: tuple[int, int] | None = None
    """Layers [from, to); None means all."""
    pool: Pool = "pages"
    """The pool of both sides. In that of states the pages are slots, and the token of each is its state."""


def state_span(our_slot: int | None, their_slot: int | None) -> Span:
    """Returns the span of the recurrent state of one sequence. None stands for a slot that the motion does not use."""
    ours, theirs = ([] if slot is None else [slot] for slot in (our_slot, their_slot))
    return Span(ours, theirs, 0, 1, pool="states")


def pieces(
    ours: KVLayout, theirs: KVLayout, span: Span, heads: HeadShare | None = None
) -> np.ndarray:  # [pieces, 3] int64: our offset, their offset, bytes
    """Returns the byte ranges of a span in both pools, for all heads if `heads` is None. The last page may be copied
    whole.

    Equal page sizes and heads make one piece per page. Otherwise there is one per layer, half and run of the greatest
    common divisor of both page sizes; if the heads of a token are laid out differently, one per layer, half and token.
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
