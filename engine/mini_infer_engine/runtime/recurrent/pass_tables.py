"""Lays out the rows of a pass over recurrent states as the tables that kernels read: once for a pass, or in memory that
does not move, for a pass that is recorded as a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.recurrence.pass_tables import CHUNK_SIZE, NO_SLOT, PassTables
from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.runtime.inputs.host_staging import PinnedStaging
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.recurrent.pass_rows import source_slot

_MOST_CHECKPOINTS = 3
"""Checkpoints of one row: `RecurrentKVCacheManager` takes no more."""
_WIDTHS = (4, 8, 4, 2)


@dataclass(frozen=True, slots=True)
class _Lines:
    """The lines of the tables, as `PassTables` describes them."""

    steps: list[tuple[int, ...]] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    chunks: list[tuple[int, ...]] = field(default_factory=list)
    stores: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Sequence[Row], pool: StatePool) -> "_Lines":
        """Takes the rows in the order of their tokens."""
        found, begin = cls(), 0
        for row in rows:
            source = source_slot(row, pool)
            source = NO_SLOT if source is None else source
            places = [(count, pool.checkpoint_slot(checkpoint)) for count, checkpoint in sorted(row.checkpoints)]
            if row.count == 1:
                found.steps.append((begin, source, row.slot, places[0][1] if places else NO_SLOT))
            else:
                chunks = _chunks(begin, row.count, len(found.rows), dict(places))
                sizes = len(found.chunks), len(chunks), len(found.stores), len(places) + 1
                found.rows.append((begin, source, row.slot, *sizes, 0))
                found.chunks.extend(chunks)
                found.stores.extend([*places, (row.count, row.slot)])
            begin += row.count
        return found

    @property
    def all(self) -> tuple[list[tuple[int, ...]], ...]:
        """The lines of all tables, in the order of `PassTables`."""
        return self.steps, self.rows, self.chunks, self.stores


def pass_tables(rows: Sequence[Row], pool: StatePool, device: torch.device) -> PassTables:
    """Returns the tables of a pass, given its rows in the order of their tokens."""
    lines = zip(_Lines.of(rows, pool).all, _WIDTHS, strict=True)
    tables = (np.array(each, dtype=np.int32).reshape(-1, width) for each, width in lines)
    steps, longer, chunks, stores = (to_device(table, device) for table in tables)
    return PassTables(steps, longer, chunks, stores, pool.slots.num_sequences)


def decode_tables(slots: Tensor, steps: Tensor, padding_slot: int) -> PassTables:
    """Returns the tables of a pass of one token for each of these slots [rows] int32, whose states are there.

    `steps` [rows, 4] is memory for the table, filled by `blank_steps`: it may be part of a CUDA graph.
    """
    steps[:, 1:3] = slots.unsqueeze(1)
    none = steps[:0]
    return PassTables(steps, none, none, none, padding_slot)


def verify_tables(slots: Tensor, steps: Tensor, tokens: int, pool: StatePool, padding_slot: int) -> PassTables:
    """Returns the tables of a pass of `tokens` consecutive tokens for each of these slots [rows] int32: the last one of
    each and its draft tokens.

    `steps` are `blank_steps` of so many tokens. The state before each draft token stays in a slot of its sequence.
    """
    tables = decode_tables(slots, steps, padding_slot)
    steps[:, 3] = slots * pool.slots.num_drafts + pool.first_draft_slot
    return replace(tables, step_tokens=tokens)


def blank_steps(rows: int, device: torch.device, tokens: int = 1) -> Tensor:
    """Returns memory for the steps of `decode_tables` or `verify_tables`, of so many tokens each."""
    steps = torch.full((rows, 4), NO_SLOT, dtype=torch.int32, device=device)
    steps[:, 0] = torch.arange(rows, device=device) * tokens
    return steps


class PaddedTables:
    """The tables of passes that are recorded once, padded to the most that such a pass has of each line."""

    def __init__(self, tokens: int, steps: int, rows: int, pool: StatePool, device: torch.device) -> None:
        """Makes room for so many tokens, of which at most `steps` are rows of one token, in at most `rows` longer
        ones.
        """
        self._pool = pool
        # A chunk that is not full ends each row, and each of its checkpoints.
        chunks = cdiv(tokens, CHUNK_SIZE) + rows * (1 + _MOST_CHECKPOINTS)
        counts = (steps, rows, chunks, rows * (1 + _MOST_CHECKPOINTS))
        sizes = [count * width for count, width in zip(counts, _WIDTHS, strict=True)]
        self._begins = np.cumsum([0, *sizes[:-1]]).tolist()
        packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._staging = PinnedStaging(packed)
        padding = pool.slots.num_sequences
        self._blank = np.zeros(sum(sizes), dtype=np.int32)
        self._blank[: sizes[0]].reshape(-1, 4)[:] = (NO_SLOT, NO_SLOT, padding, NO_SLOT)
        split = torch.split(packed, sizes)
        parts = (part.view(-1, width) for part, width in zip(split, _WIDTHS, strict=True))
        table_of_steps, longer, table_of_chunks, stores = parts
        self.tables = PassTables(table_of_steps, longer, table_of_chunks, stores, padding, is_padded=True)
        self.load([])

    def load(self, rows: Sequence[Row]) -> None:
        """Lays out the rows of the next pass."""
        array = self._staging.arrays[self._staging.begin()]
        array[:] = self._blank
        for begin, lines in zip(self._begins, _Lines.of(rows, self._pool).all, strict=True):
            numbers = [*chain.from_iterable(lines)]
            array[begin : begin + len(numbers)] = numbers
        self._staging.send()


def _chunks(begin: int, count: int, row: int, copies: dict[int, int]) -> list[tuple[int, ...]]:
    """Cuts a row's tokens into chunks, which end at the places whose states are copied, too."""
    chunks: list[tuple[int, ...]] = []
    done = 0
    for end in [*sorted(copies), count]:
        while done < end:
            size = min(CHUNK_SIZE, end - done)
            done += size
            chunks.append((begin + done - size, size, row, copies.get(done, NO_SLOT)))
    return chunks
