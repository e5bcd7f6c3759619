"""Mirrors every slot's state on the device, and tracks what the device already has, so that only changes are sent.

It decides nothing about batches; it keeps page tables and sampling parameters valid for launches.
"""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.sampling.sampling_state import HOST_RING_DEPTH, SUPPRESSED_WIDTH, SamplingState
from mini_infer_engine.kernels.sampling.state_update import (
    STATE_FIELDS,
    advance_slots,
    update_pages,
    update_slots,
)
from mini_infer_engine.sampling.parameters import DEVICE_FORMAT, DEVICE_PARAMETERS
from mini_infer_engine.sampling.reference import noise_base

_PROGRESS = struct.Struct("<5q")
"""The first fields of a slot in the packet of `update_slots` (STATE_FIELDS), up to the output index."""
_SAMPLING = struct.Struct(f"<q{DEVICE_FORMAT}q")
"""The remaining fields of a slot in the packet: noise, sampling, min_tokens."""


class DeviceBatchState:
    """State of one row for each slot, and of a spare one, which padded rows of a graph use and which never changes."""

    def __init__(
        self, num_slots: int, table_width: int, null_page: int, device: torch.device, num_groups: int = 1
    ) -> None:
        """Allocates the state of `num_slots` rows, with a page table of `table_width` pages for each KV group."""
        self.padding_slot = num_slots
        self.device = device
        self.state = SamplingState.zeros(num_slots + 1, device)
        sizes = (num_groups, num_slots + 1, table_width)
        # [KV groups, slots + 1, pages of the longest sequence] int32
        self.page_tables = torch.full(sizes, null_page, dtype=torch.int32, device=device)
        self._num_known_pages = [0] * num_slots
        self._sent_pages: list[list[list[int]]] = [[[] for _ in range(num_groups)] for _ in range(num_slots)]
        """Page tables of each slot as sent to the device, of which the first `_num_known_pages` pages are valid."""
        self._samplings = [0] * num_slots
        """Host copy of the device's `samplings`, counted where passes are launched."""
        self._filtered_slots: set[int] = set()
        self._packed_samplings: list[tuple[SamplingParams, int, bytes] | None] = [None] * num_slots
        """Parameters, seed and their packed form of each slot's last request."""

    def begin(self, rows: list[Row]) -> None:
        """Sends sampling parameters and positions of rows whose sample is their slot's first to the device."""
        if rows:
            packet = np.frombuffer(bytearray(self.pack_updates(rows)), dtype=np.int64)
            update_slots(to_device(packet.reshape(-1, STATE_FIELDS), self.device), self.state)

    def pack_updates(self, rows: list[Row]) -> bytes:
        """Returns the packet of `update_slots` for rows that begin: [rows, STATE_FIELDS] int64.

        Suppressed tokens are rare, and are sent to the device at once.
        """
        parts: list[bytes] = []
        for row in rows:
            assert row.token_ids is not None
            kept = self._packed_samplings[row.slot]
            if kept is None or kept[0] is not row.sampling or kept[1] != row.noise_seed or row.suppressed_token_ids:
                kept = self._begin_sampling(row)
            kv_length = row.start + row.count - 1  # sampling adds one to it, and to the position
            position = kv_length + row.position_offset
            parts += (_PROGRESS.pack(row.slot, row.token_ids[-1], position, kv_length, row.output_index), kept[2])
        return b"".join(parts)

    def _begin_sampling(self, row: Row) -> tuple[SamplingParams, int, bytes]:
        """Packs the parameters of another request, or of one with suppressed tokens, whose packet changes once they are
        allowed.
        """
        assert row.sampling is not None
        if row.suppressed_token_ids:
            self._suppress(row)
        (self._filtered_slots.add if _is_filtered(row) else self._filtered_slots.discard)(row.slot)
        packed = (row.sampling, row.noise_seed, _packed_sampling(row, row.sampling))
        self._packed_samplings[row.slot] = None if row.suppressed_token_ids else packed
        return packed

    def next_place(self, row: Row) -> int:
        """Returns the index in `on_host`, flattened, of the token that this row samples, which is being launched."""
        slot = row.slot
        count = self._samplings[slot] if row.token_ids is None else row.output_index
        self._samplings[slot] = count + 1
        return slot * HOST_RING_DEPTH + count % HOST_RING_DEPTH

    def has_filters(self, slots: list[int]) -> bool:
        """True if any of these slots uses top-k, top-p, min-p or suppressed tokens."""
        return bool(self._filtered_slots) and not self._filtered_slots.isdisjoint(slots)

    def pack_null_update(self) -> bytes:
        """Returns a line for the packet of `update_slots` that changes nothing: the spare slot as it is."""
        neutral = [form.neutral for _, form in DEVICE_PARAMETERS]
        return _PROGRESS.pack(self.padding_slot, 0, 0, 0, 0) + _SAMPLING.pack(0, *neutral, 0)

    def advance(self, slots: torch.Tensor) -> None:
        """Counts one more token for each of these slots [rows] int32, as sampling does, if another device samples."""
        advance_slots(slots, self.state)

    def compile_updates(self) -> None:
        """Compiles the kernels by updates that change nothing, so that no request waits for the compiler."""
        at = self.padding_slot * self.page_tables.shape[2]
        page = int(self.page_tables[0, self.padding_slot, 0])
        update_pages(torch.tensor([[at, page]], dtype=torch.int64, device=self.device), self.page_tables)
        self.advance(torch.tensor([self.padding_slot], dtype=torch.int32, device=self.device))

    def begin_pages(self, rows: list[Row], goes_on: Sequence[bool]) -> None:
        """Invalidates the device's page tables of these slots, which may belong to other sequences now.

        A row that `goes_on` by one token, perhaps as a fork of another sequence, keeps the pages that both tables begin
        with.
        """
        for row, goes in zip(rows, goes_on, strict=True):
            tables = self._sent_pages[row.slot]
            length = min(map(_common_length, tables, row.page_tables)) if goes else 0
            for sent in tables:
                del sent[length:]
            self._num_known_pages[row.slot] = length

    def send_pages(self, rows: list[Row], page_size: int, ahead: int = 0) -> None:
        """Updates the page tables of decoding rows on the device, for their new token and `ahead` tokens after it.

        The tables of all KV groups grow at the same page boundaries. A page that a row no longer retains keeps its
        place on the device: no kernel reads pages that are wholly behind the window.
        """
        known, (_, num_slots, width) = self._num_known_pages, self.page_tables.shape
        changes: list[int] = []
        for row in rows:
            slot, needed = row.slot, (row.start + ahead) // page_size + 1
            if known[slot] < needed:
                at = slot * width
                for sent, table in zip(self._sent_pages[slot], row.page_tables, strict=True):
                    for index in range(known[slot], needed):
                        changes += (at + index, table[index])
                    sent += table[known[slot] : needed]
                    at += num_slots * width
                known[slot] = needed
        if changes:
            update_pages(to_device(np.array(changes, dtype=np.int64).reshape(-1, 2), self.device), self.page_tables)

    def compacted(self, rows: list[Row]) -> None:
        """Records that the caches of these rows' sequences are shorter, and in other pages, after their pass."""
        num_evicted = [row.start + row.count - row.compaction.num_kept for row in rows if row.compaction is not None]
        packet = to_device(np.array([[row.slot for row in rows], num_evicted], dtype=np.int64), self.device)
        # Not set but reduced: sampling, which may come later, adds one for the token that it appends.
        self.state.kv_lengths.index_add_(0, packet[0], packet[1].to(torch.int32), alpha=-1)
        self.begin_pages(rows, [False] * len(rows))

    def _suppress(self, row: Row) -> None:
        token_ids = list(row.suppressed_token_ids)
        assert len(token_ids) <= SUPPRESSED_WIDTH, "refuses_suppressed was not called"
        padded = np.full(SUPPRESSED_WIDTH, -1, dtype=np.int32)
        padded[: len(token_ids)] = token_ids
        self.state.suppressed[row.slot].copy_(to_device(padded, self.device))


def _common_length(some: Sequence[int], others: Sequence[int]) -> int:
    """Returns the length of the common prefix. A fork has most often all or all but the last page in common."""
    if some == others[: len(some)]:
        return len(some)
    if some[:-1] == others[: len(some) - 1]:
        return len(some) - (some[-1:] != others[len(some) - 1 : len(some)])
    pairs = zip(some, others, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(some), len(others)))


def refuses_suppressed(params: SamplingParams, eos_token_ids: Iterable[int]) -> str | None:
    """Returns an error if these parameters suppress more tokens than a slot has room for on the device, or None."""
    if not params.min_tokens:
        return None
    suppressed = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if len(suppressed) <= SUPPRESSED_WIDTH:
        return None
    return (
        f"min_tokens = {params.min_tokens} with {len(suppressed)} stop tokens (stop_token_ids and the model's own): "
        f"at most {SUPPRESSED_WIDTH} can be held back on this engine; send fewer stop_token_ids, or no min_tokens."
    )


def _is_filtered(row: Row) -> bool:
    params = row.sampling
    assert params is not None
    return bool(row.suppressed_token_ids) or params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _packed_sampling(row: Row, params: SamplingParams) -> bytes:
    return _SAMPLING.pack(
        noise_base(row.noise_seed),
        *[form.value(getattr(params, name)) for name, form in DEVICE_PARAMETERS],
        params.min_tokens if row.suppressed_token_ids else 0,  # else the slot's last sequence's would be suppressed
    )


def page_table_width(max_model_len: int, page_size: int) -> int:
    """Returns the pages of the longest sequence."""
    return -(-max_model_len // page_size)
