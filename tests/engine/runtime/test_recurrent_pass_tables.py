"""Tables of passes over recurrent states: steps, rows, chunks and places where states are stored."""

import torch

from mini_infer_engine.core.batch import Row
from mini_infer_engine.models.state_spec import StateSpec
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.memory.state_slots import StateSlots
from mini_infer_engine.runtime.recurrent.pass_tables import pass_tables

CPU = torch.device("cpu")


def make_pool() -> StatePool:
    """Returns a pool of four sequences and four checkpoints."""
    spec = StateSpec(1, 2, 3, (1, 2, 2), torch.float32)
    return StatePool(spec, StateSlots(spec.slot_bytes, 4, 4), CPU)


def test_states_are_stored_in_the_order_of_tokens_when_checkpoints_are_not() -> None:
    pool = make_pool()
    row = Row(1, 0, 70, [3] * 70, [], None, checkpoints=[(64, 2), (5, 0), (70, 1)])
    tables = pass_tables([row], pool, CPU)
    slots = [pool.checkpoint_slot(place) for place in (0, 2, 1)]
    assert tables.stores.tolist() == [[5, slots[0]], [64, slots[1]], [70, slots[2]], [70, 1]]
    assert tables.rows.tolist() == [[0, -1, 1, 0, 3, 0, 4, 0]]


def test_chunks_between_two_stores_are_whole_but_the_last() -> None:
    pool = make_pool()
    row = Row(1, 0, 200, [3] * 200, [], None, checkpoints=[(130, 0)])
    chunks = pass_tables([row], pool, CPU).chunks
    assert chunks[:, :2].tolist() == [[0, 64], [64, 64], [128, 2], [130, 64], [194, 6]]
