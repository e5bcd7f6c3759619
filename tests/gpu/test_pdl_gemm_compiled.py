"""pdl_gemm with quantised weights, compiled for Hopper without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, but no GPU")
pytest.importorskip("triton.experimental.gluon", reason="needs a Triton that has Gluon")

from tests.gpu.device import KERNELS

pytestmark = KERNELS
PROGRAM = """
import re, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Hopper())
from mini_infer_engine.kernels.gemm import pdl_gemm as module
from mini_infer_engine.kernels.gemm.gemm_config import PdlGemmConfig
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight

class Workspace:
    counters = torch.zeros(4, dtype=torch.int32)
    def partials(self, floats): return torch.empty(4)

class Compiled:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid): return self
    def __call__(self, *args, **constants): self.made = self.kernel.warmup(*args, grid=(1, 1, 1), **constants)

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
ptx = module._pdl_gemm.made.asm["ptx"]
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "kernel.ptx"
    file.write_text(ptx)
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    done = subprocess.run([assembler, "-v", "--gpu-name", "sm_90a", file, "-o", file.with_suffix(".cubin")],
                          capture_output=True, text=True, check=True)
operands = re.findall(r"wgmma.mma_async\\S* [{][^}]*[}], (.)", ptx)
print(len(operands), operands.count("{"), "serialized" in done.stderr,
      *re.findall(r"([0-9]+) bytes spill stores", done.stderr), *re.findall(r"Used ([0-9]+) registers", done.stderr))
"""


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_weights_are_operands_in_registers_and_nothing_spills(form: str, m: int, wide: bool, tmp_path: Path) -> None:
    """Four programs of these registers fit an SM."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", PROGRAM, form, str(m), str(wide)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    products, from_registers, is_serialized, spilled, registers = done.stdout.split()
    assert int(products) == int(from_registers) == 256 // 16
    assert (is_serialized, spilled) == ("False", "0")
    assert int(registers) <= 128
