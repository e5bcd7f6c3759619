"""Divides the rows of a pass by the states that they go on from and leave: rows of one token, and segments of others.

A segment ends where a checkpoint of the state is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer_engine.core.batch import Row
from mini_infer_engine.runtime.memory.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class StateStep:
    """A row of one token."""

    token: int
    """The row's place among the tokens of the pass."""
    source: int | None
    """The slot of the state before it; None: it is the first of its sequence."""
    target: int
    """The slot of the state after it."""
    checkpoint: int | None
    """Another slot to which the state after it is copied."""


@dataclass(frozen=True, slots=True)
class StateSegment:
    """Tokens of one longer row between two states that are stored."""

    tokens: slice
    source: int | None
    """The slot of the state before them; None: they are the first of their sequence."""
    targets: list[int]
    """The one or two slots to which the state after them is copied."""


@dataclass(frozen=True, slots=True)
class PassRows:
    """The rows of a pass."""

    steps: list[StateStep]
    segments: list[StateSegment]

    @classmethod
    def of(cls, rows: Sequence[Row], pool: StatePool) -> "PassRows":
        """Takes the rows in the order of their tokens."""
        found, begin = cls([], []), 0
        for row in rows:
            if row.count == 1:
                checkpoint = pool.checkpoint_slot(row.checkpoints[0][1]) if row.checkpoints else None
                found.steps.append(StateStep(begin, source_slot(row, pool), row.slot, checkpoint))
            else:
                found.segments.extend(_segments(row, begin, pool))
            begin += row.count
        return found


def source_slot(row: Row, pool: StatePool) -> int | None:
    """Returns the slot of the state before a row, or None if the row begins its sequence."""
    if not row.start:
        return None
    return row.slot if row.state_source is None else pool.checkpoint_slot(row.state_source)


def _segments(row: Row, begin: int, pool: StatePool) -> list[StateSegment]:
    """Returns the segments of a row whose tokens begin at this place of the pass."""
    source, segments, done = source_slot(row, pool), [], 0
    for count, checkpoint in row.checkpoints:
        slot = pool.checkpoint_slot(checkpoint)
        targets = [slot, row.slot] if count == row.count else [slot]
        segments.append(StateSegment(slice(begin + done, begin + count), source, targets))
        source, done = slot, count
    if done < row.count:
        segments.append(StateSegment(slice(begin + done, begin + row.count), source, [row.slot]))
    return segments
