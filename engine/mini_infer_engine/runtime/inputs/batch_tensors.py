"""Converts a `Batch` to tensors: one array filled on the host, one copy to the device, views into it.

It knows the layout of a pass, not what is computed from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.device import to_device
from mini_infer_engine.runtime.inputs.image_inputs import PassImages


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
    write_pages: Tensor  # [KV groups, tokens] page of each new token
    write_offsets: Tensor  # [tokens] its place in that page
    page_tables: Tensor  # [KV groups, rows, most pages of a row], padded with the spare page
    kv_lengths: Tensor  # [rows] tokens in the cache before the new ones, as `starts`
    ends: Tensor  # [rows] and with them
    query_starts: Tensor  # [rows + 1] where each row's tokens begin
    sample_rows: Tensor  # [samples] indices of each sampling row's last tokens, mostly of one
    sample_starts: Tensor  # [rows + 1] samples before each row
    sample_slots: Tensor  # [samples]
    pending_tokens: Tensor  # [pending] tokens whose id only the device knows
    pending_slots: Tensor  # [pending] the slots that sampled them
    all_pending: bool
    images: PassImages | None = None
    """Images of the pass; set by the executor."""

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
    tables = _padded_tables(rows, pages_needed, null_page)

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
        tables[:, row_of_token, cache_indexes // page_size].reshape(-1),
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
    columns = torch.split(to_device(np.concatenate(parts), device), [len(part) for part in parts])
    ids, places, pages, offsets, flat_tables, lengths, totals, begins, *samples_and_pending = columns
    sample_rows, sample_starts, sample_slots, pending_at, pending_slots = samples_and_pending
    return PassInputs(
        num_decodes=batch.num_decodes,
        slots=[row.slot for row in rows],
        changed_slots={row.slot for row in rows if row.token_ids is not None},
        starts=starts,
        counts=counts,
        token_ids=ids,
        positions=places,
        write_pages=pages.view(len(tables), -1),
        write_offsets=offsets,
        page_tables=flat_tables.view(tables.shape),
        kv_lengths=lengths,
        ends=totals,
        query_starts=begins,
        sample_rows=sample_rows,
        sample_starts=sample_starts,
        sample_slots=sample_slots,
        pending_tokens=pending_at,
        pending_slots=pending_slots,
        all_pending=len(pending) == len(token_ids),
    )


def _padded_tables(rows: Sequence[Row], pages_needed: Sequence[int], null_page: int) -> np.ndarray:
    """Returns the first pages of each row, as many as it needs, as an array [KV groups, rows, most pages]."""
    num_groups = 1 + len(rows[0].more_page_tables)
    padded = np.full((num_groups, len(rows), max(pages_needed)), null_page, dtype=np.int64)
    tables_of_groups = zip(*(row.page_tables for row in rows), strict=True)
    for group, tables in zip(padded, tables_of_groups, strict=True):
        for row, table, needed in zip(group, tables, pages_needed, strict=True):
            row[:needed] = table[:needed]
    return padded
