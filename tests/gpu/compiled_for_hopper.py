"""Kernels compiled for Hopper without a GPU: by programs of their own, in which Triton knows no other driver."""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class _Hopper:
    """What Triton's compiler asks a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def pretend_hopper() -> None:
    """From now on kernels' `warmup` compiles for sm_90a."""
    driver.set_active(_Hopper())


class Compiled:
    """In a kernel's place: a launch compiles it, and nothing runs."""

    made: Any

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: object) -> "Compiled":
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        self.made = self._kernel.warmup(*arguments, grid=(1, 1, 1), **constants)


class Workspace:
    """Of a kernel that does not run."""

    counters = torch.zeros(4, dtype=torch.int32)

    def partials(self, floats: int) -> torch.Tensor:
        return torch.empty(4)


@dataclass(frozen=True, slots=True)
class KernelProperties:
    """What the compiler made of a kernel."""

    products: int
    """wgmma instructions."""
    from_registers: int
    """Those whose left operand is in registers."""
    is_serialized: bool
    """Whether ptxas could not let them run beside other instructions."""
    spilled_bytes: int
    registers: int
    shared_bytes: int


def print_properties(compiled: Any) -> None:
    """Print the facts of what `warmup` returned."""
    print(json.dumps(asdict(_properties(compiled))))


def properties_of(program: str, *arguments: object, cache: Path) -> KernelProperties:
    """What a program tells that compiles a kernel."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return KernelProperties(**json.loads(done.stdout))


def _properties(compiled: Any) -> KernelProperties:
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [assembler, "-v", "--gpu-name", "sm_90a", file, "-o", file.with_suffix(".cubin")]
        reported = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    operands = re.findall(r"wgmma.mma_async\S* [{][^}]*[}], (.)", ptx)
    (spilled,) = map(int, re.findall(r"([0-9]+) bytes spill stores", reported))
    (registers,) = map(int, re.findall(r"Used ([0-9]+) registers", reported))
    return KernelProperties(
        len(operands), operands.count("{"), "serialized" in reported, spilled, registers, compiled.metadata.shared
    )
