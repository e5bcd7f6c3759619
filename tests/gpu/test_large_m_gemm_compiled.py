"""large_m_gemm with each form of quantised weights, compiled for Hopper without a GPU."""

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
from mini_infer_engine.kernels.gemm import large_m_gemm as module
from mini_infer_engine.kernels.gemm.gemm_config import LargeMConfig
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight

form, is_grouped = sys.argv[1].removesuffix("-groups"), sys.argv[1] != sys.argv[1].removesuffix("-groups")
m, n, k, is_int4 = 256, 3584, 4096, form == "int4"
values = torch.empty(n, k // 2 if is_int4 else k, dtype=torch.uint8 if is_int4 else torch.int8)
values = values.view(torch.float8_e4m3fn) if form == "fp8" else values
scales = torch.empty(k // 128, n, dtype=torch.int32 if is_int4 else torch.float32) if is_grouped else torch.empty(n)
weight = QuantizedWeight(values, scales, k)
x, out = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(m, n, dtype=torch.bfloat16)
module._large_m_gemm, module._sum_parts = Compiled(module._large_m_gemm), Compiled(module._sum_parts)
module.large_m_gemm(x, weight, LargeMConfig(256, 128, 3, 1), sm_count=132, workspace=Workspace(), out=out)
print_properties(module._large_m_gemm.made)
"""


@pytest.mark.parametrize("form", ["int8", "int8-groups", "fp8", "fp8-groups", "int4-groups"])
def test_weights_are_operands_in_registers(form: str, tmp_path: Path) -> None:
    """Two steps of 128 columns, 16 of each instruction."""
    properties = properties_of(PROGRAM, form, cache=tmp_path)
    assert properties.products == properties.from_registers == 2 * 128 // 16
    assert not properties.is_serialized
