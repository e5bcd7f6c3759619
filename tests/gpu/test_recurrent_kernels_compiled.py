"""Kernels of linear recurrences, compiled for Hopper without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, but no GPU")

from tests.gpu.compiled_for_hopper import properties_of
from tests.gpu.device import KERNELS

pytestmark = KERNELS
SHARED_BYTES = 227 << 10
"""Shared memory of an SM that one block may use."""
PROGRAM = """
import sys
import torch
from tests.gpu.compiled_for_hopper import Compiled, pretend_hopper, print_properties

pretend_hopper()
from mini_infer_engine.kernels.recurrence import scan_chunks as scan
from mini_infer_engine.kernels.recurrence import update_states as update

kernel, heads, key_dim, value_dim = sys.argv[1], *map(int, sys.argv[2:])
scan._scan_chunks, update._update_states = Compiled(scan._scan_chunks), Compiled(update._update_states)
states = torch.empty(4, heads, key_dim, value_dim)
out = torch.empty(512, heads, value_dim, dtype=torch.bfloat16)
if kernel == "scan":
    wide, values = torch.empty(8, heads, 64, key_dim), torch.empty(8, heads, 64, value_dim)
    within, kept, slots = torch.empty(8, heads, 64, 64), torch.empty(8, heads), torch.zeros(4, dtype=torch.int32)
    scan.scan_chunks(wide, within, wide, kept, values, wide, states, slots, out)
    print_properties(scan._scan_chunks.made)
else:
    keys, values, decays = torch.empty(512, 1, key_dim), torch.empty(512, heads, value_dim), torch.empty(512, heads)
    steps = torch.zeros(8, 4, dtype=torch.int32)
    update.update_states(keys, keys, values, decays, decays, states, steps, out)
    print_properties(update._update_states.made)
"""


@pytest.mark.parametrize("sizes", [(32, 128, 128), (128, 256, 64)], ids=["Qwen3-Next", "Mamba-2 with a wide state"])
def test_a_scan_fits_an_sm_when_it_is_compiled_for_hopper(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    properties = properties_of(PROGRAM, "scan", *sizes, cache=tmp_path)
    assert properties.shared_bytes <= SHARED_BYTES
    assert properties.products > 0


@pytest.mark.parametrize("sizes", [(32, 128, 128), (128, 256, 64)], ids=["Qwen3-Next", "Mamba-2 with a wide state"])
def test_an_update_keeps_its_state_in_registers_when_it_is_compiled_for_hopper(
    sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    assert properties_of(PROGRAM, "update", *sizes, cache=tmp_path).spilled_bytes == 0
