"""Experts in MXFP4, compiled for Hopper without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, but no GPU")

from mini_infer_engine.kernels.moe.mx_experts import mx_tile
from tests.gpu.compiled_for_hopper import properties_of
from tests.gpu.device import KERNELS

pytestmark = KERNELS
PROGRAM = """
import sys
import torch
from tests.gpu.compiled_for_hopper import Compiled, pretend_hopper, print_properties

pretend_hopper()
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.moe import mx_experts, mx_few_rows
from mini_infer_engine.kernels.moe.route import Routing

mean_rows, is_gated, size = float(sys.argv[1]), sys.argv[2] == "gated", 2880
module, kernel = (mx_few_rows, "_few_rows") if mean_rows <= mx_experts.FEW_ROWS else (mx_experts, "_mx_experts")
compiled = Compiled(getattr(module, kernel))
setattr(module, kernel, compiled)
tokens = int(mean_rows * 8) if mean_rows <= mx_experts.FEW_ROWS else 32
numbers = torch.zeros(32, tokens, dtype=torch.int32)
routing = Routing(torch.zeros(tokens, 4), numbers[:tokens, :4], numbers[:, 0], numbers, False)
values = torch.zeros(1, size, size // 2, dtype=torch.uint8)
weight = GroupedWeight("mxfp4", values, torch.zeros(1, size, 96, dtype=torch.bfloat16), size, 32)
x, out = torch.zeros(tokens, size, dtype=torch.bfloat16), torch.zeros(tokens * 4, size, dtype=torch.bfloat16)
bias = torch.zeros(32, 2 * size, dtype=torch.bfloat16)
if mean_rows <= mx_experts.FEW_ROWS:
    mx_few_rows.few_rows_product(x, routing, weight, out, is_gated=is_gated, bias=bias, limit=7.0)
else:
    height, tile = mx_experts.mx_tile(mean_rows)
    mx_experts.mx_product(x, routing, weight, out, height, tile, is_gated=is_gated, bias=bias, limit=7.0)
print_properties(compiled.made)
"""


@pytest.mark.parametrize("product", ["gated", "down"])
@pytest.mark.parametrize("mean_rows", [8, 16, 64, 128, 512])
def test_products_read_weights_from_registers_beside_other_instructions_when_compiled_for_hopper(
    mean_rows: int, product: str, tmp_path: Path
) -> None:
    properties = properties_of(PROGRAM, mean_rows, product, cache=tmp_path)
    assert properties.products == properties.from_registers > 0
    assert not properties.is_serialized
    assert properties.spilled_bytes == 0
    _, tile = mx_tile(mean_rows)
    assert properties.shared_bytes * (1 if tile.num_warps == 8 else 2) <= 227 << 10


@pytest.mark.parametrize("product", ["gated", "down"])
@pytest.mark.parametrize("mean_rows", [0.5, 1, 4, 5])
def test_programs_of_few_rows_keep_all_in_registers_when_compiled_for_hopper(
    mean_rows: float, product: str, tmp_path: Path
) -> None:
    properties = properties_of(PROGRAM, mean_rows, product, cache=tmp_path)
    assert properties.spilled_bytes == 0
    assert properties.shared_bytes * 8 <= 227 << 10, "several programs fit an SM"
