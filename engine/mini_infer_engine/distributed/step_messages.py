"""Encodes passes for the other ranks as differences to the pass before. It uses neither torch nor sockets.

A decode row that continues as expected is sent as its slot's number alone; page tables are sent as the pages that were
appended. Both ends keep the last row of each slot: `StepWriter` and `StepReader` see the same messages in the same
order.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from mini_infer_engine.core.batch import Batch, Row, TokenMasks, Transfers
from mini_infer_engine.core.images import EncoderWork
from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseLoad, PageMove, StateMove
from mini_infer_engine.kv_transfer.transport import TransportChoice


class Launch(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Launches a pass."""

    rows: list[int | Row]
    """Rows of the batch. A number is a slot whose row follows from its last one. The page table of a decode row has
    only the appended pages.
    """
    num_decodes: int
    pages: dict[int, list[int]] = {}
    """Pages that are appended to slots sent as a number, in the first KV group."""
    more_pages: dict[int, list[list[int]]] = {}
    """Appended pages in each of the other KV groups."""
    transfers: Transfers | None = None
    waits_for_masks: bool = False
    encoder: EncoderWork | None = None
    loads: list[int] = []
    """Tickets of the loads that the pass follows, whose `CopyBlocks` have come since the last pass."""


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Samples the tokens of the pass that was launched last, with these masks."""

    rows: list[int]
    words: int
    """Number of 32-bit words of each row's mask."""
    bits: bytes


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """Returns the numbers of all ranks, in order of the ranks, after all have reached the same point."""

    values: list[int]


class OpenTransport(msgspec.Struct, frozen=True, tag=True):
    """Opens the transport for KV transfer, whose commands follow on another socket (see
    `kv_transfer.transports.group_transport`).
    """

    choice: TransportChoice
    engine_id: str


class CopyBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copies pages and states between a rank's device and its main memory, after all passes launched so far, as
    `host_copies` says.
    """

    ticket: int
    way: Literal["store", "load", "load_layerwise"]
    moves: list[PageMove]
    states: list[StateMove] = []


class OpenDisk(msgspec.Struct, frozen=True, tag=True):
    """Opens a rank's part of the tier on the disk, as `disk_copies` says."""

    path: str
    """The folder of the engine, in which each rank has its own."""
    identity: str
    capacity_bytes: int
    """Bytes for each rank."""
    page_tokens: int


class WriteToDisk(msgspec.Struct, frozen=True, tag=True):
    """Writes a rank's part of a page of main memory to its disk."""

    ticket: int
    host_page: int
    header: bytes
    """The encoded record of the page."""


class ReadFromDisk(msgspec.Struct, frozen=True, tag=True):
    """Reads a rank's part of a page from its disk into main memory."""

    ticket: int
    name: bytes
    host_page: int


class ClearDisk(msgspec.Struct, frozen=True, tag=True):
    """Drops all files of a rank."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Ends the rank."""


StepMessage = (
    Launch | Sample | Agreed | OpenTransport | CopyBlocks | OpenDisk | WriteToDisk | ReadFromDisk | ClearDisk | Stop
)


def _packed(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent to other ranks")


encode = msgspec.msgpack.Encoder(enc_hook=_packed).encode
decode = msgspec.msgpack.Decoder(StepMessage).decode


class StepWriter:
    """Encodes batches on the first rank."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._last: dict[int, Row] = {}
        self._num_sent_pages: dict[int, int] = {}

    def launch(self, batch: Batch, loads: Sequence[int] = ()) -> Launch:
        """Returns the message for a batch, which every rank must get. `loads` are the tickets of those it follows."""
        pages: dict[int, list[int]] = {}
        more_pages: dict[int, list[list[int]]] = {}
        rows = [self._packed(row, pages, more_pages) for row in batch.rows]
        moves = None if batch.transfers.is_empty else batch.transfers
        return Launch(
            rows, batch.num_decodes, pages, more_pages, moves, batch.waits_for_masks, batch.encoder, list(loads)
        )

    def _packed(self, row: Row, pages: dict[int, list[int]], more_pages: dict[int, list[list[int]]]) -> int | Row:
        slot, needed = row.slot, (row.start + row.count - 1) // self._page_size + 1
        last = self._last.get(slot)
        num_sent = 0 if row.token_ids is not None else self._num_sent_pages.get(slot, 0)
        self._last[slot] = row
        appended: list[int] = []
        more: list[list[int]] = []
        if num_sent < needed:
            appended = list(row.page_table[num_sent:needed])
            more = [list(table[num_sent:needed]) for table in row.more_page_tables]
            self._num_sent_pages[slot] = needed
        if row.compaction is not None:  # the next row has other pages
            self._num_sent_pages[slot] = 0
        if last is not None and row.token_ids is None and row == following(last, row.page_table, row.more_page_tables):
            if appended:
                pages[slot] = appended
            if more:
                more_pages[slot] = more
            return slot
        sampling = row.sampling
        if sampling is not None and sampling.grammar is not None:
            sampling = msgspec.structs.replace(sampling, grammar=None)  # masks say what it allows
        return msgspec.structs.replace(row, page_table=appended, more_page_tables=more, sampling=sampling)


class StepReader:
    """Decodes batches on every other rank."""

    def __init__(self) -> None:
        self._last: dict[int, Row] = {}
        self._tables: dict[int, tuple[list[int], list[list[int]]]] = {}
        """The page table of each slot in the first KV group, and those in the others."""

    def batch(self, message: Launch, loads: Sequence[LayerwiseLoad] = ()) -> Batch:
        """Returns the batch that the first rank launches. `loads` are this rank's parts of those that it follows."""
        rows = [self._row(packed, message) for packed in message.rows]
        return Batch(
            rows,
            message.num_decodes,
            message.transfers or Transfers(),
            encoder=message.encoder,
            layerwise_loads=list(loads),
            waits_for_masks=message.waits_for_masks,
        )

    def _row(self, packed: int | Row, message: Launch) -> Row:
        if isinstance(packed, int):
            pages, more_pages = message.pages.get(packed, ()), message.more_pages.get(packed, ())
            row = following(self._last[packed], *self._extended(packed, pages, more_pages))
        else:
            if packed.token_ids is not None:
                self._tables.pop(packed.slot, None)
            table, more = self._extended(packed.slot, packed.page_table, packed.more_page_tables)
            row = msgspec.structs.replace(packed, page_table=table, more_page_tables=more)
            if row.compaction is not None:
                self._tables.pop(row.slot)
        self._last[row.slot] = row
        return row

    def _extended(
        self, slot: int, pages: Sequence[int], more_pages: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[list[int]]]:
        """Appends pages to the tables of a slot, and returns these."""
        table, more = self._tables.setdefault(slot, ([], [[] for _ in more_pages]))
        table += pages
        for one, its_pages in zip(more, more_pages, strict=False):
            one += its_pages
        return table, more


def following(last: Row, page_table: Any, more_page_tables: Any) -> Row:
    """Returns the decode row after `last` if nothing else has changed."""
    start, index = last.start + last.count, last.output_index + 1
    return Row(
        last.slot,
        start,
        1,
        None,
        page_table,
        last.sampling,
        last.noise_seed,
        index,
        more_page_tables=more_page_tables,
        position_offset=last.position_offset,
        counts_attention=last.counts_attention,
    )


def masks_message(masks: TokenMasks) -> Sample:
    """Returns the message for the masks of a batch."""
    return Sample(masks.rows, masks.bits.shape[1], masks.bits.tobytes())


def masks_of(message: Sample) -> TokenMasks:
    """Returns the masks of a message."""
    return TokenMasks(message.rows, np.frombuffer(message.bits, dtype=np.uint32).reshape(-1, message.words))
