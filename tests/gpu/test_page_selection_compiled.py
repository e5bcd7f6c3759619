"""Page selection, and decode attention over page tables of each KV head, compiled for Hopper without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, but no GPU")

from tests.gpu.compiled_for_hopper import properties_of
from tests.gpu.device import KERNELS

pytestmark = KERNELS
PROGRAM = """
import sys
import torch
from tests.gpu.compiled_for_hopper import Compiled, Workspace, pretend_hopper, print_properties

pretend_hopper()
from mini_infer_engine.kernels.attention import hopper_decode_attention as attention
from mini_infer_engine.kernels.attention import page_selection as module
from mini_infer_engine.kernels.attention.attention_config import PrefillShape, decode_config, hopper_decode_block
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import FIELDS, DecodePlan
from mini_infer_engine.kernels.attention.rope_kv import Rotation

kernel, (head_dim, page_size, group, width) = sys.argv[1], map(int, sys.argv[2:])
kv_heads, rows, dtype = 8, 2, torch.bfloat16
rotation = Rotation(torch.zeros(64, head_dim, dtype=dtype))
rows_of_ints = torch.zeros(rows, dtype=torch.int32)
plan = module.SelectionPlan(
    slots=rows_of_ints, positions=rows_of_ints, kv_lengths=rows_of_ints,
    page_tables=torch.zeros(rows, width, dtype=torch.int32), lengths=rows_of_ints, kv_index=rows_of_ints,
    scores=torch.zeros(rows, kv_heads, width),
    selected=torch.zeros(rows, kv_heads, 4096 // page_size, dtype=torch.int32),
    page_size=page_size, first_pages=1, last_pages=2, most_pages=width, pdl=True,
)
qkv = torch.zeros(rows, (group + 2) * kv_heads * head_dim, dtype=dtype)
pool = torch.zeros(4, 3, 2, page_size, kv_heads, head_dim, dtype=dtype)[:, 2]
bounds = torch.zeros(4, 3, kv_heads, 2, head_dim, dtype=dtype)[:, 1]
kernels = {name: Compiled(getattr(module, name)) for name in ("_score_pages", "_select_pages", "_bound_pages")}
vars(module).update(kernels)
attention._hopper_decode_attention = kernels["attention"] = Compiled(attention._hopper_decode_attention)
if kernel == "attention":
    shape = PrefillShape(dtype, dtype, 0, 0, kv_heads * group, kv_heads, head_dim, page_size, None, 0)
    config = decode_config(rows, kv_heads, 132, split_kv=True, pdl=True, hopper_block=hopper_decode_block(shape))
    entries = DecodePlan(torch.zeros(17, FIELDS.value, dtype=torch.int32), None, config, splits=True)
    decode_attention(qkv, rotation, pool, plan.selected, entries, scale=1.0, workspace=Workspace())
else:
    module.select_pages(qkv, rotation, bounds, plan)
    module.bound_pages(pool, rows_of_ints, bounds, pdl=True)
print_properties(kernels[kernel].made)
"""


@pytest.mark.parametrize("kernel", ["_score_pages", "_select_pages", "_bound_pages", "attention"])
@pytest.mark.parametrize(
    ("head_dim", "page_size", "group", "width"), [(128, 128, 4, 1024), (64, 32, 16, 4096)], ids=["8b", "small pages"]
)
def test_kernels_compile_for_hopper_without_spills(
    kernel: str, head_dim: int, page_size: int, group: int, width: int, tmp_path: Path
) -> None:
    properties = properties_of(PROGRAM, kernel, head_dim, page_size, group, width, cache=tmp_path)
    assert properties.spilled_bytes == 0
    assert properties.registers <= 255
    assert properties.shared_bytes <= 140_000
