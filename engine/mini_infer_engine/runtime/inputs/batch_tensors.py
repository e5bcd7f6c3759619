"""Converts a `Batch` to tensors: one array filled on the host, one copy to the device, views into it.

It knows the layout of a pass, not what is computed from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Batch
from mini_infer_engine.device import to_device


@dataclass(slots=True)
class PageAddresses:
    """The pages of one KV group in a pass, int64 on the device."""

    write_pages: Tensor  # [tokens] page of each new token
    page_tables: Tensor  # [rows, most pages of a row], padded with the spare page


@dataclass(slots=True)
class PassInputs:
    """The inputs of one pass. Tensors are int64 on the device; lists are host copies of values on which backends
    branch.
    """

    num_decodes: int
    slots: list[int]
    changed_slots: set[int]
    """Slots of rows that came with their tokens: their sequence may be another than in the pass before."""
    starts: list[int]
    """Cache indexes of each row's first new token."""
    counts: list[int]
    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens] of each in its text
    write_pages: Tensor  # [tokens] page of each new token
    write_offsets: Tensor  # [tokens] its place in that page
    page_tables: Tensor  # [rows, most pages of a row], padded with the spare page
    kv_lengths: Tensor  # [rows] tokens in the cache before the new ones, as `starts`
    ends: Tensor  # [rows] and with them
    query_starts: Tensor  # [rows + 1] where each row's tokens begin
    sample_rows: Tensor  # [samples] indices of each sampling row's last tokens, mostly of one
    sample_starts: Tensor  # [rows + 1] samples before each row
    sample_slots: Tensor  # [samples]
    pending_tokens: Tensor  # [pending] tokens whose id only the device knows
    pending_slots: Tensor  # [pending] the slots that sampled them
    all_pending: bool
    more_groups: list[PageAddresses] = field(default_factory=list)
    """The tables of the other KV groups; `write_pages` and `page_tables` are those of the first."""

    @property
    def groups(self) -> list[PageAddresses]:
        """The pages of all KV groups."""
        return [PageAddresses(self.write_pages, self.page_tables), *self.more_groups]

    @property
    def num_tokens(self) -> int:
        """Tokens of this pass."""
        return self.token_ids.shape[0]


def build_inputs(batch: Batch, page_size: int, null_page: int, device: torch.device) -> PassInputs:
    """Lays a batch out for the device without waiting for it."""
    rows = batch.rows
    num_rows = len(rows)
    starts, counts = [row.start for row in rows], [row.count for row in rows]
    ends = [row.start + row.count for row in rows]
    pages_needed = [-(-end // page_size) for end in ends]
    tables = _padded([row.page_table for row in rows], pages_needed, null_page)
    tables_of_groups = zip(*(row.more_page_tables for row in rows), strict=True)
    more_tables = [_padded(group, pages_needed, null_page) for group in tables_of_groups]

    start_array, count_array = np.array(starts, dtype=np.int64), np.array(counts, dtype=np.int64)
    query_starts = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(count_array, out=query_starts[1:])
    row_of_token = np.repeat(np.arange(num_rows), count_array)
    cache_indexes = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - start_array, count_array)
    positions = cache_indexes + np.repeat([row.position_offset for row in rows], count_array)
    token_ids = np.zeros(query_starts[-1], dtype=np.int64)
    pending: list[int] = []
    for index, row in enumerate(rows):
        begin = query_starts[index]
        if row.token_ids is None:
            pending.append(index)
        else:
            token_ids[begin : begin + row.count] = np.asarray(row.token_ids)
    num_samples = np.array([0 if row.sampling is None else row.num_samples for row in rows], dtype=np.int64)
    samples_before = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(num_samples, out=samples_before[1:])
    row_of_sample = np.repeat(np.arange(num_rows), num_samples)
    samples_left = samples_before[1:][row_of_sample] - np.arange(samples_before[-1])  # of its row, with itself

    parts = [
        token_ids,
        positions,
        tables[row_of_token, cache_indexes // page_size],
        cache_indexes % page_size,
        tables.reshape(-1),
        start_array,
        start_array + count_array,
        query_starts,
        query_starts[1:][row_of_sample] - samples_left,
        samples_before,
        np.array([row.slot for row in rows], dtype=np.int64)[row_of_sample],
        query_starts[pending],
        np.array([rows[index].slot for index in pending], dtype=np.int64),
    ]
    for table in more_tables:
        parts += (table[row_of_token, cache_indexes // page_size], table.reshape(-1))
    columns = torch.split(to_device(np.concatenate(parts), device), [len(part) for part in parts])
    ids, places, pages, offsets, flat_tables, lengths, totals, begins, *samples_and_pending = columns
    sample_rows, sample_starts, sample_slots, pending_at, pending_slots, *more = samples_and_pending
    return PassInputs(
        num_decodes=batch.num_decodes,
        slots=[row.slot for row in rows],
        changed_slots={row.slot for row in rows if row.token_ids is not None},
        starts=starts,
        counts=counts,
        token_ids=ids,
        positions=places,
        write_pages=pages,
        write_offsets=offsets,
        page_tables=flat_tables.view(num_rows, -1),
        kv_lengths=lengths,
        ends=totals,
        query_starts=begins,
        sample_rows=sample_rows,
        sample_starts=sample_starts,
        sample_slots=sample_slots,
        pending_tokens=pending_at,
        pending_slots=pending_slots,
        all_pending=len(pending) == len(token_ids),
        more_groups=[
            PageAddresses(write_pages, table.view(num_rows, -1))
            for write_pages, table in zip(more[::2], more[1::2], strict=True)
        ],
    )


def _padded(tables: Sequence[Sequence[int]], pages_needed: Sequence[int], null_page: int) -> np.ndarray:
    """Returns the first pages of each row, as many as it needs, as an array [rows, most pages]."""
    padded = np.full((len(tables), max(pages_needed)), null_page, dtype=np.int64)
    for row, table, needed in zip(padded, tables, pages_needed, strict=True):
        row[:needed] = table[:needed]
    return padded
