"""The split-KV schedule of a decode pass: whole sequences, splits of equal length, no program too many."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.attention.attention_config import DecodeConfig
from mini_infer_engine.kernels.attention.decode_plan import plan_decode, plan_decode_of_groups
from tests.gpu.device import DEVICE, KERNELS, POLICY, cases

pytestmark = KERNELS


def needed(kv_lengths: list[int], window: int, block: int, split_blocks: int) -> int:
    """Splits of all rows where none has more than `split_blocks` blocks."""
    firsts = [max(length + 1 - window, 0) // block * block for length in kv_lengths]
    blocks = [max(1, -(-(length - first) // block)) for length, first in zip(kv_lengths, firsts, strict=True)]
    return sum(-(-count // split_blocks) for count in blocks)


@pytest.mark.parametrize(
    ("kv_lengths", "kv_heads", "window", "config"),
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
    kv_lengths: list[int], kv_heads: int, window: int | None, config: DecodeConfig
) -> None:
    block, seen = config.block_tokens, window or 1 << 30
    slots = torch.arange(len(kv_lengths), dtype=torch.int32, device=DEVICE) + 3
    page_size = 16
    tables = torch.randperm((len(kv_lengths) + 3) * 1025, device=DEVICE).int().view(-1, 1025)
    positions = [length + 31 * row + 7 for row, length in enumerate(kv_lengths)]
    places = (torch.tensor(values, device=DEVICE) for values in (positions, kv_lengths))
    with_pages = replace(config, hopper=True)
    plan = plan_decode(
        slots, *places, kv_heads, 1 << 14, window, config=with_pages, page_tables=tables, page_size=page_size
    )
    entries = plan.entries.tolist()
    used = [entry for entry in entries if entry[0] >= 0]
    assert entries[: len(used)] == used, "programs without work come last"
    assert plan.splits == (len(entries) > len(kv_lengths))

    longest = 0
    for row, length in enumerate(kv_lengths):
        own = [entry for entry in used if entry[0] == row]
        if length < 0:
            assert not own
            continue
        first = max(length + 1 - seen, 0) // block * block
        assert [entry[5] for entry in own] == list(range(len(own)))
        for entry in own:
            assert entry[1:3] == [row + 3, length]
            assert entry[6:8] == [len(own), positions[row]]
            assert entry[8:] == [int(tables[row + 3, place // page_size]) for place in (entry[3], length)]
        assert [entry[3] for entry in own] == [first, *[entry[4] for entry in own[:-1]]]
        assert own[-1][4] == length
        sizes = [-(-(entry[4] - entry[3]) // block) for entry in own]
        assert len(own) == 1 or min(sizes) >= 1
        longest = max(longest, *sizes)
    assert all(entry[6] <= 64 for entry in used)
    most_blocks = max(-(-(length - max(length + 1 - seen, 0) // block * block) // block) for length in kv_lengths)
    if longest > max(1, -(-most_blocks // 64), int((1.6 / 32 * most_blocks) ** 0.5)):
        assert needed(kv_lengths, seen, block, longest - 1) > len(entries), "a shorter split would do"


@pytest.mark.parametrize("hopper", [True, False])
def test_plans_of_groups_differ_in_their_pages_alone_when_the_kernel_reads_pages_from_its_plan(hopper: bool) -> None:
    tables = torch.randperm(3 * 4 * 70, device=DEVICE).int().view(3, 4, 70)
    slots = torch.tensor([2, 0, 3], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([1000, 63, 64], device=DEVICE)
    config = DecodeConfig(target_programs=9, hopper=hopper)
    common = {"config": config, "page_size": 16}
    plans = plan_decode_of_groups(slots, places, places, 1, 1100, 128, page_tables=tables, **common)
    assert len(plans) == 3
    for plan, table in zip(plans, tables, strict=True):
        alone = plan_decode(slots, places, places, 1, 1100, 128, page_tables=table, **common)
        assert plan.entries.is_contiguous()
        used = alone.entries[:, 0] >= 0
        assert torch.equal(plan.entries[:, 0], alone.entries[:, 0])
        fields = slice(None, 10 if hopper else 8)
        assert torch.equal(plan.entries[used][:, fields], alone.entries[used][:, fields])
    assert (plans[0].entries is plans[1].entries) != hopper


@pytest.mark.parametrize(("kv_length", "splits"), [(3000, [47, 24, 12]), (4095, [64, 64, 32]), (65_535, [64, 64, 64])])
def test_splits_of_a_lone_sequence_by_query_heads_that_are_merged(kv_length: int, splits: list[int]) -> None:
    slots, place = torch.zeros(1, dtype=torch.int32, device=DEVICE), torch.tensor([kv_length], device=DEVICE)
    plans = [
        plan_decode(slots, place, place, 1, 1 << 17, config=POLICY.decode_config(1, 1), group=group)
        for group in (1, 2, 7)
    ]
    assert [int((plan.entries[:, 0] >= 0).sum()) for plan in plans] == splits
