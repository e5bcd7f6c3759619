"""The split-KV schedule of a decode pass: whole sequences, splits of equal length, no program too many."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.attention.attention_config import DecodeConfig
from mini_infer_engine.kernels.attention.decode_plan import plan_decode
from tests.gpu.device import DEVICE, KERNELS, POLICY, cases

pytestmark = KERNELS


def needed(positions: list[int], window: int, block: int, split_blocks: int) -> int:
    """Splits of all rows where none has more than `split_blocks` blocks."""
    firsts = [max(position + 1 - window, 0) // block * block for position in positions]
    blocks = [max(1, -(-(position - first) // block)) for position, first in zip(positions, firsts, strict=True)]
    return sum(-(-count // split_blocks) for count in blocks)


@pytest.mark.parametrize(
    ("positions", "kv_heads", "window", "config"),
    cases(
        [
            ([0], 4, None, DecodeConfig(264)),
            ([639], 4, None, DecodeConfig(264)),
            ([16_383], 1, None, DecodeConfig(264)),
            ([0, 5, 64, 65, 1000], 2, None, DecodeConfig(target_programs=24, block_tokens=32)),
            ([900, 90, 9], 1, 1, DecodeConfig(target_programs=9)),
            ([900, 90, 9], 1, 128, DecodeConfig(target_programs=9)),
            ([4000, *[100] * 40], 8, None, DecodeConfig(264)),
            ([16_383, 7], 1, None, DecodeConfig(target_programs=1000)),
            ([500] * 7, 8, None, DecodeConfig(target_programs=1, programs_per_row=1.0)),
            ([100, 700, -1, -1], 1, None, DecodeConfig(target_programs=9)),  # the last are padding
            ([-1, -1], 1, None, DecodeConfig(target_programs=9)),
        ],
        [([37 * row % 2000 for row in range(512)], 8, None, DecodeConfig(264))],
    ),
)
def test_splits_cover_each_row_in_equal_lengths(
    positions: list[int], kv_heads: int, window: int | None, config: DecodeConfig
) -> None:
    block, seen = config.block_tokens, window or 1 << 30
    slots = torch.arange(len(positions), dtype=torch.int32, device=DEVICE) + 3
    plan = plan_decode(slots, torch.tensor(positions, device=DEVICE), kv_heads, 1 << 14, window, config=config)
    entries = plan.entries.tolist()
    used = [entry for entry in entries if entry[0] >= 0]
    assert entries[: len(used)] == used, "programs without work come last"
    assert plan.splits == (len(entries) > len(positions))

    longest = 0
    for row, position in enumerate(positions):
        own = [entry for entry in used if entry[0] == row]
        if position < 0:
            assert not own
            continue
        first = max(position + 1 - seen, 0) // block * block
        assert [entry[5] for entry in own] == list(range(len(own)))
        for entry in own:
            assert entry[1:3] == [row + 3, position]
            assert entry[6] == len(own)
        assert [entry[3] for entry in own] == [first, *[entry[4] for entry in own[:-1]]]
        assert own[-1][4] == position
        lengths = [-(-(entry[4] - entry[3]) // block) for entry in own]
        assert len(own) == 1 or min(lengths) >= 1
        longest = max(longest, *lengths)
    assert all(entry[6] <= 64 for entry in used)
    most_blocks = max(-(-(position - max(position + 1 - seen, 0) // block * block) // block) for position in positions)
    if longest > max(1, -(-most_blocks // 64), int((1.6 / 32 * most_blocks) ** 0.5)):
        assert needed(positions, seen, block, longest - 1) > len(entries), "a shorter split would do"


@pytest.mark.parametrize(("position", "splits"), [(3000, [47, 24, 12]), (4095, [64, 64, 32]), (65_535, [64, 64, 64])])
def test_splits_of_a_lone_sequence_by_query_heads_that_are_merged(position: int, splits: list[int]) -> None:
    slots, positions = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.tensor([position], device=DEVICE)
    plans = [
        plan_decode(slots, positions, 1, 1 << 17, config=POLICY.decode_config(1, 1), group=group) for group in (1, 2, 7)
    ]
    assert [int((plan.entries[:, 0] >= 0).sum()) for plan in plans] == splits
