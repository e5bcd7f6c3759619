"""Slots of recurrent state out of the KV cache's memory."""

from typing import Any

import pytest

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings, ResolvedSettings
from mini_infer_engine.runtime.memory.state_slots import StateSlots, state_slots


def settings(**changes: Any) -> ResolvedSettings:
    return EngineSettings(model="any", **changes).resolved()


@pytest.mark.parametrize(
    ("max_num_seqs", "kv_bytes", "caching", "expected"),
    [
        (4, 10_000, True, (4, 16)),
        (4, 6_400, True, (4, 16)),
        (4, 6_000, True, (4, 15)),
        (64, 1_000, True, (5, 2)),
        (64, 1_000, False, (5, 0)),
        (1, 399, True, (1, 0)),
        (9, 200, True, (1, 0)),
    ],
)
def test_sequences_take_half_of_the_memory_and_checkpoints_a_quarter_when_it_is_scarce(
    max_num_seqs: int, kv_bytes: int, caching: bool, expected: tuple[int, int]
) -> None:
    slots = state_slots(100, kv_bytes, settings(max_num_seqs=max_num_seqs, enable_prefix_caching=caching))
    assert slots == StateSlots(100, *expected)
    assert slots.num_bytes <= kv_bytes * 3 / 4


def test_a_start_is_refused_by_name_when_no_state_fits() -> None:
    with pytest.raises(ModelError, match=r"kv_cache_memory = 199.* 200\."):
        state_slots(100, 199, settings())
