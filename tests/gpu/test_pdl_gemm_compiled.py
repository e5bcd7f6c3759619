"""pdl_gemm with quantised weights, compiled for Hopper without a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, but no GPU")
pytest.importorskip("triton.experimental.gluon", reason="needs a Triton that has Gluon")

from tests.gpu.compiled_for_hopper import properties_of
from tests.gpu.device import KERNELS

pytestmark = KERNELS
PROGRAM = """
import sys
import torch
from tests.gpu.compiled_for_hopper import Compiled, Workspace, pretend_hopper, print_properties

pretend_hopper()
from mini_infer_engine.kernels.gemm import pdl_gemm as module
from mini_infer_engine.kernels.gemm.gemm_config import PdlGemmConfig
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight

form, m, wide = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
n, k, is_int4 = 3584, 4096, form == "int4"
values = torch.empty(n, k // 2 if is_int4 else k, dtype=torch.uint8 if is_int4 else torch.int8)
values = values.view(torch.float8_e4m3fn) if form == "fp8" else values
weight = QuantizedWeight(values, torch.empty(k // 128, n, dtype=torch.int32) if is_int4 else torch.empty(n), k)
x, out = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(m, n, dtype=torch.bfloat16)
module._pdl_gemm = Compiled(module._pdl_gemm)
options = dict(BIAS=False, RESIDUAL=True, GATED=False, PARTS=0, NEXT_NORM=False)
epilogue = (None, out, None, None, out, out, None)
module.launch_pdl_gemm(
    x, weight, epilogue, (m, n, k), (0, 0.0), PdlGemmConfig(64, 256, 2, 4, wide=wide), options, Workspace()
)
print_properties(module._pdl_gemm.made)
"""


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_weights_are_operands_in_registers_and_nothing_spills(form: str, m: int, wide: bool, tmp_path: Path) -> None:
    """Four programs of these registers fit an SM."""
    properties = properties_of(PROGRAM, form, m, wide, cache=tmp_path)
    assert properties.products == properties.from_registers == 256 // 16
    assert (properties.is_serialized, properties.spilled_bytes) == (False, 0)
    assert properties.registers <= 128
