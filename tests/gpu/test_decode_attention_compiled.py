"""Decode attention, portable and for Hopper, compiled for Hopper without a GPU, with heads of several widths."""

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
from mini_infer_engine.kernels.attention import decode_attention as module
from mini_infer_engine.kernels.attention.attention_config import decode_config
from mini_infer_engine.kernels.attention.decode_plan import FIELDS, DecodePlan
from mini_infer_engine.kernels.attention.rope_kv import Rotation

head_dim, dtype, stored = int(sys.argv[1]), getattr(torch, sys.argv[2]), getattr(torch, sys.argv[3])
kv_heads, group = 8, 4
config = decode_config(1, kv_heads, 132, split_kv=True, pdl=True, quantized=stored == torch.int8)
plan = DecodePlan(torch.zeros(17, FIELDS.value, dtype=torch.int32), None, config, splits=True)
qkv = torch.zeros(1, (group + 2) * kv_heads * head_dim, dtype=dtype)
pool = torch.zeros(4, 2, 128, kv_heads, head_dim, dtype=stored)
rotation, tables = Rotation(torch.zeros(64, head_dim, dtype=dtype)), torch.zeros(4, 8, dtype=torch.int32)
module._decode_attention = Compiled(module._decode_attention)
module.decode_attention(qkv, rotation, pool, tables, plan, scale=1.0, workspace=Workspace(), early=True)
print_properties(module._decode_attention.made)
"""


@pytest.mark.parametrize("stored", ["", "int8"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((64, "bfloat16"), (80, "float32"), (96, "float32"), (128, "bfloat16"), (160, "bfloat16")),
        *((512, "bfloat16"), (512, "float32")),
    ],
)
def test_heads_of_any_width_compile(head_dim: int, dtype: str, stored: str, tmp_path: Path) -> None:
    properties = properties_of(PROGRAM, head_dim, dtype, stored or dtype, cache=tmp_path)
    assert properties.registers <= 255
    assert properties.spilled_bytes == 0 or head_dim > 128 or dtype == "float32"
    assert properties.shared_bytes <= 227 << 10


HOPPER_PROGRAM = """
import sys
import torch
from tests.gpu.compiled_for_hopper import Compiled, Workspace, pretend_hopper, print_properties

pretend_hopper()
from mini_infer_engine.kernels.attention import hopper_decode_attention as module
from mini_infer_engine.kernels.attention.attention_config import PrefillShape, decode_config, hopper_decode_block
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import FIELDS, DecodePlan
from mini_infer_engine.kernels.attention.rope_kv import Rotation

(head_dim, page_size, kv_heads, group), dtype = map(int, sys.argv[1:5]), torch.bfloat16
shape = PrefillShape(dtype, dtype, 0, 0, kv_heads * group, kv_heads, head_dim, page_size, None, 0)
config = decode_config(1, kv_heads, 132, split_kv=True, pdl=True, hopper_block=hopper_decode_block(shape))
plan = DecodePlan(torch.zeros(17, FIELDS.value, dtype=torch.int32), 1000, config, splits=True)
qkv = torch.zeros(1, (group + 2) * kv_heads * head_dim, dtype=dtype)
pool = torch.zeros(4, 2, page_size, kv_heads, head_dim, dtype=dtype)
norm = torch.zeros(head_dim, dtype=dtype)
rotation, tables = Rotation(torch.zeros(64, head_dim, dtype=dtype), norm, norm), torch.zeros(4, 8, dtype=torch.int32)
module._hopper_decode_attention = Compiled(module._hopper_decode_attention)
decode_attention(qkv, rotation, pool, tables, plan, scale=1.0, workspace=Workspace(), early=True)
print_properties(module._hopper_decode_attention.made)
"""


@pytest.mark.parametrize(
    ("head_dim", "page_size", "kv_heads", "group"),
    [(128, 128, 8, 2), (128, 256, 4, 7), (128, 32, 8, 1), (64, 128, 8, 4), (256, 128, 1, 16)],
)
def test_the_kernel_for_hopper_fits(head_dim: int, page_size: int, kv_heads: int, group: int, tmp_path: Path) -> None:
    properties = properties_of(HOPPER_PROGRAM, *map(str, (head_dim, page_size, kv_heads, group)), cache=tmp_path)
    assert properties.spilled_bytes == 0
    assert properties.shared_bytes <= 140_000
