"""What travels to the device depends on the rows alone, never on what the slots held before."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState
from tests.gpu.device import DEVICE, KERNELS

pytestmark = KERNELS
SLOTS, WIDTH, PAGE_TOKENS = 3, 6, 16
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[5, 9]),
]


def fresh_state(num_groups: int = 1) -> DeviceBatchState:
    return DeviceBatchState(SLOTS, WIDTH, 99, DEVICE, num_groups)


def random_row(dice: random.Random) -> Row:
    params, output_index = dice.choice(PARAMS), dice.randrange(6)
    suppressed = params.stop_token_ids if output_index < params.min_tokens else ()
    start = dice.randrange(WIDTH * PAGE_TOKENS)
    # Few pages and seeds, so that much is as it was before.
    pages = [dice.choice((index, index + 10)) for index in range(WIDTH)]
    slot, seed, token = dice.randrange(SLOTS), dice.randrange(2), dice.randrange(50)
    offset = dice.randrange(3)
    return Row(slot, start, 1, [token], pages, params, seed, output_index, suppressed, position_offset=offset)


def test_packets_and_filters_do_not_depend_on_earlier_requests() -> None:
    dice, state = random.Random(1), fresh_state()
    for _ in range(200):
        row, fresh = random_row(dice), fresh_state()
        assert state.pack_updates([row]) == fresh.pack_updates([row])
        assert state.has_filters([row.slot]) == fresh.has_filters([row.slot])


def test_positions_and_cache_indexes_begin_apart_and_advance_together_but_for_padding() -> None:
    state = fresh_state()
    state.begin([Row(slot, 4, 6, [7] * 6, [0], PARAMS[0], position_offset=30 * slot) for slot in range(SLOTS)])
    assert state.state.kv_lengths.tolist() == [9, 9, 9, 0], "sampling adds one"
    assert state.state.positions.tolist() == [9, 39, 69, 0]
    state.advance(torch.tensor([2, SLOTS, 0, SLOTS], dtype=torch.int32, device=DEVICE))
    assert state.state.kv_lengths.tolist() == [10, 9, 10, 0]
    assert state.state.positions.tolist() == [10, 39, 70, 0]


def test_page_tables_are_those_of_the_rows_whether_pages_are_kept_or_forgotten() -> None:
    num_groups = 3
    dice, state = random.Random(2), fresh_state(num_groups)
    for _ in range(60):
        row = random_row(dice)
        row.more_page_tables = [random_row(dice).page_table for _ in range(num_groups - 1)]
        state.begin_pages([row], [dice.random() < 0.7])
        state.send_pages([row], PAGE_TOKENS)
        known = row.start // PAGE_TOKENS + 1
        for table, pages in zip(state.page_tables, row.page_tables, strict=True):
            assert table[row.slot, :known].tolist() == pages[:known]
    assert (state.page_tables[:, -1] == 99).all(), "the spare slot's tables were written"
