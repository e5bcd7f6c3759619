"""Choices of how the kernels of gated delta nets are launched."""

import pytest
import torch

from mini_infer_engine.kernels.recurrence.gated_delta_config import scan_config, step_config
from mini_infer_engine.kernels.workspace import COUNTERS

HEADS = 32


@pytest.mark.parametrize("steps", [1, 2, 8, 9, 128, COUNTERS // HEADS])
def test_a_step_has_columns_that_divide_a_head(steps: int) -> None:
    config = step_config(steps, HEADS, pdl=True)
    assert 128 % config.block_values == 0
    assert config.pdl == (steps <= 32)


def test_a_program_has_a_whole_head_when_counters_do_not_suffice() -> None:
    config = step_config(COUNTERS // HEADS + 1, HEADS, pdl=True)
    assert config.block_values >= 256
    assert not config.pdl


def test_pdl_is_off_when_the_policy_forbids_it() -> None:
    assert not step_config(1, HEADS, pdl=False).pdl


def test_a_scan_has_one_chunk_in_shared_memory_when_operands_are_fp32() -> None:
    assert scan_config(torch.float32).stages == 1
    assert scan_config(torch.bfloat16).stages > 1
