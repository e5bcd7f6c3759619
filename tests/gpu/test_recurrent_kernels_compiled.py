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
from types import SimpleNamespace
import torch
from tests.gpu.compiled_for_hopper import Compiled, pretend_hopper, print_properties

pretend_hopper()
from mini_infer_engine.kernels.recurrence import chunk_outputs, chunk_states, gated_delta_prepare, gated_delta_scan
from mini_infer_engine.kernels.recurrence import gated_delta_step, state_space_step
from mini_infer_engine.kernels.recurrence.gated_delta_config import scan_config, step_config
from mini_infer_engine.kernels.recurrence.pass_tables import PassTables

kernel, rule, dtype = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3])
heads, key_heads, key_dim, value_dim = map(int, sys.argv[4:8])
is_delta = rule == "delta"
modules = {"step": gated_delta_step if is_delta else state_space_step, "prepare": gated_delta_prepare}
modules |= {"states": gated_delta_scan if is_delta else chunk_states, "outputs": chunk_outputs}
names = {"step": "_gated_delta_step" if is_delta else "_state_space_step", "prepare": "_prepare_gated_delta"}
names |= {"states": "_gated_delta_scan" if is_delta else "_chunk_states", "outputs": "_chunk_outputs"}
if is_delta and kernel == "states":
    gated_delta_scan._normalise_chunks = Compiled(gated_delta_scan._normalise_chunks)
compiled = Compiled(getattr(modules[kernel], names[kernel]))
setattr(modules[kernel], names[kernel], compiled)
keys, width = key_heads * key_dim, heads * value_dim
mixed, out = torch.empty(512, 2 * keys + width, dtype=dtype), torch.empty(512, width, dtype=dtype)
narrow, per_head = torch.empty(512, 2 * heads, dtype=dtype)[:, :heads], torch.empty(heads)
states, totals = torch.empty(4, heads, key_dim, value_dim), torch.empty(512, heads)
rows = [torch.zeros(8, columns, dtype=torch.int32) for columns in (4, 8, 4, 2)]
tables = PassTables(*rows, 6)
q, k, v = mixed.split([keys, keys, width], dim=1)
values = torch.empty(512, heads, key_dim, dtype=dtype)
before, weight = torch.empty(8, heads, key_dim, value_dim, dtype=dtype), torch.empty(value_dim, dtype=dtype)
if kernel == "step" and is_delta:
    weights = narrow, narrow, per_head, per_head
    workspace = SimpleNamespace(counters=torch.zeros(4, dtype=torch.int32))
    config = step_config(int(sys.argv[8]), heads, pdl=True)
    rest = states, tables, out, config, workspace
    gated_delta_step.gated_delta_step(mixed, out, *weights, weight, 1e-6, *rest)
elif kernel == "step":
    state_space_step.state_space_step(mixed, narrow, per_head, per_head, per_head, (0.0, 1.0), states, tables, out)
elif kernel == "prepare":
    gated_delta_prepare.prepare_gated_delta(mixed, narrow, narrow, per_head, per_head, key_dim, value_dim, tables)
elif kernel == "states" and is_delta:
    attention = torch.empty(8, heads, 64, 64, dtype=dtype)
    made = values, values, attention, totals.T.contiguous(), totals.T.contiguous(), torch.empty(8, heads)
    prepared = gated_delta_prepare.PreparedChunks(*made)
    rest = states, tables, out, scan_config(dtype)
    gated_delta_scan.gated_delta_scan(q, k, prepared, out, weight, 1e-6, *rest)
elif kernel == "states":
    chunk_states.chunk_states(k, v, totals, totals, states, tables)
else:
    chunk_outputs.state_space_outputs(q, k, v, totals, totals, before, per_head, tables, out)
print_properties(compiled.made)
"""
SHAPES = {"delta": (32, 16, 128, 128), "space": (128, 1, 256, 64)}
"""Heads, key heads, key_dim and value_dim of Qwen3-Next, and of Mamba-2 with a wide state."""
DTYPES = ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("kernel", "rule"),
    [("prepare", "delta"), ("states", "delta"), ("states", "space"), ("outputs", "space")],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_fit_an_sm_when_they_are_compiled_for_hopper(kernel: str, rule: str, dtype: str, tmp_path: Path) -> None:
    properties = properties_of(PROGRAM, kernel, rule, dtype, *SHAPES[rule], cache=tmp_path)
    assert properties.shared_bytes <= SHARED_BYTES
    if dtype == "bfloat16":
        assert properties.products > 0
        # The preparation spills a few, so that three of its programs fit an SM.
        assert properties.spilled_bytes <= (32 if kernel == "prepare" else 0)


@pytest.mark.parametrize(("rule", "steps"), [("delta", 1), ("delta", 128), ("delta", 4096), ("space", 1)])
def test_a_step_keeps_its_state_in_registers_when_it_is_compiled_for_hopper(
    rule: str, steps: int, tmp_path: Path
) -> None:
    assert properties_of(PROGRAM, "step", rule, "bfloat16", *SHAPES[rule], steps, cache=tmp_path).spilled_bytes == 0
