"""Slots of recurrent state out of the KV cache's memory."""

from typing import Any

import pytest

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings, ResolvedSettings
from mini_infer_engine.runtime.memory.state_slots import StateSlots, running_share, state_slots


def settings(**changes: Any) -> ResolvedSettings:
    return EngineSettings(model="any", **changes).resolved()


@pytest.mark.parametrize(
    ("slot_bytes", "token_bytes", "expected"),
    [
        (151_000_000, 16_384, 0.8),  # Granite 4 small
        (75_000_000, 24_576, 0.598),  # Qwen3-Next
        (2_048_000, 1_000, 0.5),
        (100_000, 12_288, 0.25),  # LFM2
        (100, 0, 0.8),
    ],
)
def test_running_states_get_their_share_of_a_usual_sequence(slot_bytes: int, token_bytes: int, expected: float) -> None:
    assert running_share(slot_bytes, token_bytes) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("token_bytes", "max_num_seqs", "kv_bytes", "caching", "expected"),
    [
        (0, 4, 10_000, True, (4, 16)),
        (0, 4, 6_400, True, (4, 16)),
        (0, 4, 6_000, True, (4, 15)),
        (0, 64, 1_000, True, (8, 1)),
        (0, 64, 1_000, False, (8, 0)),
        (0, 1, 299, True, (1, 0)),
        (1, 64, 10_000, True, (25, 25)),
        (1, 64, 1_000, True, (2, 2)),
        (1, 9, 700, True, (1, 1)),
        (0, 9, 200, True, (1, 0)),
    ],
)
def test_sequences_take_their_share_and_checkpoints_half_of_the_rest_when_memory_is_scarce(
    token_bytes: float, max_num_seqs: int, kv_bytes: int, caching: bool, expected: tuple[int, int]
) -> None:
    slots = state_slots(100, token_bytes, kv_bytes, settings(max_num_seqs=max_num_seqs, enable_prefix_caching=caching))
    assert slots == StateSlots(100, *expected)
    assert slots.num_bytes < kv_bytes


def test_a_start_is_refused_by_name_when_no_state_fits() -> None:
    with pytest.raises(ModelError, match=r"kv_cache_memory = 124.* 125\."):
        state_slots(100, 0, 124, settings())
    state_slots(100, 0, 125, settings())
